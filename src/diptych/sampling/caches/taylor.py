"""Extrapolation of the blocks' residual by a Taylor series of finite differences.

Source: "From Reusing to Forecasting: Accelerating Diffusion Models with TaylorSeers" (arXiv 2503.06923), applied to the
residual of the whole stack of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import factorial
from typing import Any, ClassVar

from diptych.sampling.caches.base import Residual, Run, Steps
from diptych.sampling.forward import Forward
from diptych.sampling.latents import Latents


@dataclass(frozen=True)
class TaylorSettings:
    """order: of the highest difference, 0 to 3; max_run: steps predicted after each computed one; retention: share of
    steps computed first; last: steps computed at the end."""

    order: int = 1
    max_run: int = 2
    retention: float = 0.2
    last: int = 1
    name: ClassVar[str] = "taylor"
    needs: ClassVar[str] = ""

    def start(self, run: Run) -> Taylor:
        return Taylor(self, run)


class Taylor:
    """Decided by counting steps."""

    def __init__(self, settings: TaylorSettings, run: Run) -> None:
        self.order = settings.order
        first = int(run.steps * settings.retention)
        self.steps = Steps(run, first=first, last=settings.last, max_run=settings.max_run)
        self._at: dict[int, int] = {}
        self._differences: dict[int, list[Residual]] = {}

    def velocity(self, forward: Forward) -> Latents:
        if not self.steps.decide(forward.step, lambda: False):
            return forward.head(self.ahead(forward.lane, forward.step).onto(forward.embed_only()))
        before = forward.embed()
        after = forward.blocks(before)
        self.keep(forward.lane, forward.step, Residual.between(before, after))
        return forward.head(after)

    def keep(self, lane: int, step: int, residual: Residual) -> None:
        """Take the residual of a computed step, and with it the differences to those before."""
        differences = [residual]
        for older in self._differences.get(lane, [])[: self.order]:
            gap = step - self._at[lane]
            differences.append(differences[-1].with_(older, lambda a, b, gap=gap: (a - b) / gap))  # type: ignore[misc]
        self._at[lane], self._differences[lane] = step, differences

    def ahead(self, lane: int, step: int) -> Residual:
        """The residual that is to be expected at a later step."""
        sum_, *higher = self._differences[lane]
        for power, difference in enumerate(higher, start=1):
            weight = (step - self._at[lane]) ** power / factorial(power)
            sum_ = sum_.with_(difference, lambda a, b, weight=weight: a + weight * b)  # type: ignore[misc]
        return sum_

    def report(self) -> dict[str, Any]:
        return self.steps.report()
