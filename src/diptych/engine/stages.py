"""Where the time goes: each stage is timed and told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

from diptych.engine.progress import OnProgress, Progress, Stage

Advance = Callable[..., None]


class Stages:
    """Times the stages of one request and passes `Progress` on.

    `seconds` holds what each stage took, in the order they first ran; a stage that runs twice adds up.
    """

    def __init__(self, on_progress: OnProgress | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._tell = on_progress or (lambda progress: None)

    @contextmanager
    def stage(self, name: Stage, total: int = 1) -> Iterator[Advance]:
        """Run one stage of `total` units. The block gets `advance(done, preview=None)`; the end is told by itself."""
        start = time.perf_counter()

        def advance(done: int, preview: Callable[[], Tensor] | None = None) -> None:
            spent = time.perf_counter() - start
            left = spent / done * (total - done) if done else None
            self._tell(Progress(name, done, total, spent, left, preview))

        advance(0)
        try:
            yield advance
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start
        advance(total)
