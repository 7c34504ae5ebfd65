"""Being told to stop by other programs, as by Ctrl-C."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def stoppable() -> Iterator[None]:
    """Let SIGTERM, and SIGHUP of a terminal that closes, unwind the program as Ctrl-C does, so that no file or folder
    is left behind.

    Not what the caller ignores (nohup), and not under torchrun: a rank that waits for others would not hear it.
    """
    here = threading.current_thread() is threading.main_thread() and "RANK" not in os.environ
    taken = [s for s in (signal.SIGTERM, signal.SIGHUP) if here and signal.getsignal(s) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, _stop)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def _stop(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
