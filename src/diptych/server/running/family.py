"""Ending a process with all that came from it: ranks lead sessions of their own, so a process group is not enough."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """All processes below `pid`, by /proc; empty where there is none."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
    found = [pid]
    for above in found:  # grows while it is walked
        found += [child for child, parent in parents.items() if parent == above]
    return found[1:]


def kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def wait_gone(pids: list[int], seconds: float) -> list[int]:
    """Those that still live after `seconds`; the dead whose parent has not asked for them count as gone."""
    deadline = time.monotonic() + seconds
    while True:
        left = [pid for pid in pids if _lives(pid)]
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.02)


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except (OSError, IndexError):
        return False
