"""Starting, hearing and ending one engine process."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from multiprocessing import Pipe
from typing import Any

from diptych.server.running.family import descendants, kill, wait_gone
from diptych.server.settings import Settings

log = logging.getLogger(__name__)

ENGINE = "diptych.engine.engine:Engine.load"


class EngineProcess:
    """A running worker. `pipe` carries messages; `end` leaves no process of its group behind."""

    def __init__(self, settings: Settings, index: int, engine: str = ENGINE) -> None:
        options = {
            "checkpoint": settings.checkpoint,
            "layout": settings.replica_layout(index),
            "device": settings.device,
            "dtype": settings.dtype,
            "precision": settings.precision,
            "text_precision": settings.text_precision,
            "modulation": settings.modulation,
            "offload": settings.offload,
            "memory": settings.memory,
            "step_cache": settings.cache or None,
            "warm_up": settings.warm_up,
            "preview_every": settings.preview_every,
            "cache": str(settings.state_dir / "cache"),
            "log_level": settings.log_level,
            "engine": engine,
        }
        self.pipe, theirs = Pipe()
        environment = dict(os.environ)
        gpus = settings.replica_gpus(index)
        if gpus is not None:
            environment["CUDA_VISIBLE_DEVICES"] = gpus
        self.process = subprocess.Popen(
            [sys.executable, "-m", "diptych.server.running.worker", str(theirs.fileno()), json.dumps(options)],
            pass_fds=[theirs.fileno()],
            env=environment,
            start_new_session=True,
        )
        theirs.close()

    def send(self, message: Any) -> None:
        """Tell the worker; one that is gone shows itself at the next read."""
        with contextlib.suppress(OSError):
            self.pipe.send(message)

    def end(self) -> None:
        """Kill the process and all that came from it, then wait: afterwards the GPUs are free."""
        if self.pipe.closed:
            return
        self.pipe.close()
        family = descendants(self.process.pid)
        kill(family)  # before the process: should the server be killed in between, it still ends what is below it
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        left = wait_gone(family, 10.0)
        if left:
            log.warning("processes %s of the engine have not ended", left)
