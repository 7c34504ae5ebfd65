"""TeaCache: the change of what enters the first block, put through a fitted polynomial, tells the change of the output.

Source: "Timestep Embedding Tells: It's Time to Cache for Video Diffusion Model" (arXiv 2411.19108). The polynomial is
fitted for each checkpoint by `diptych calibrate`; one of another model says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from diptych.sampling.caches.base import Residual, Run, Steps
from diptych.sampling.forward import Forward
from diptych.sampling.latents import Latents


@dataclass(frozen=True)
class TeaCacheSettings:
    """threshold: predicted relative change that may add up; max_run: steps predicted in a row; retention: share of
    steps computed first; last: steps computed at the end."""

    threshold: float = 0.15
    max_run: int = 3
    retention: float = 0.2
    last: int = 1
    name: ClassVar[str] = "teacache"
    needs: ClassVar[str] = "polynomial"

    def start(self, run: Run) -> TeaCache:
        return TeaCache(self, run)


class TeaCache:
    """Decided on the conditional lane by the first rank, which holds all of its input; everyone follows."""

    def __init__(self, settings: TeaCacheSettings, run: Run) -> None:
        self.threshold, self.agreement, self.known = settings.threshold, run.agreement, run.known
        first = int(run.steps * settings.retention)
        self.steps = Steps(run, first=first, last=settings.last, max_run=settings.max_run)
        self._residuals: dict[int, Residual] = {}
        self._entered: Tensor | None = None
        self._sum = 0.0

    def velocity(self, forward: Forward) -> Latents:
        lane = forward.lane
        change = 0.0
        if forward.step == len(self.steps.computed):  # every rank once a step: the first modulation may be in pieces
            entering = forward.first_input()
            if self._entered is not None:
                change = relative_change(entering, self._entered)
            self._entered = entering
        if not self.steps.decide(forward.step, lambda: self.agreement.decide(self._changed(change))):
            return forward.head(self._residuals[lane].onto(forward.embed_only()))
        before = forward.embed()
        after = forward.blocks(before)
        self._residuals[lane], self._sum = Residual.between(before, after), 0.0
        return forward.head(after)

    def _changed(self, change: float) -> bool:
        low, high = self.known.span
        self._sum += max(float(np.polyval(self.known.polynomial, min(max(change, low), high))), 0.0)
        return self._sum >= self.threshold

    def report(self) -> dict[str, Any]:
        return self.steps.report()


def relative_change(now: Tensor, before: Tensor) -> float:
    """mean |now - before| / mean |before|."""
    return float((now.float() - before.float()).abs().mean() / before.float().abs().mean())
