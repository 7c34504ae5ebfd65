"""MagCache: the residual of the blocks changes little in direction, so its magnitude tells the error of reusing it.

Source: "MagCache: Fast Video Generation with Magnitude-Aware Cache" (arXiv 2506.09045), with the constants and counting
of Kandinsky 6's native code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from diptych.sampling.caches.base import Residual, Run, counts
from diptych.sampling.forward import Forward
from diptych.sampling.latents import Latents


@dataclass(frozen=True)
class MagCacheSettings:
    """threshold: error that may add up; max_run: steps predicted in a row; retention: share of steps computed first;
    last: steps computed at the end."""

    threshold: float = 0.12
    max_run: int = 2
    retention: float = 0.2
    last: int = 0
    name: ClassVar[str] = "magcache"
    needs: ClassVar[str] = "ratios"

    def start(self, run: Run) -> MagCache:
        return MagCache(magcache_plan(run.known.ratios[: run.lanes], self))


def magcache_plan(ratios: Sequence[Sequence[float]], settings: MagCacheSettings) -> list[list[bool]]:
    """Which forwards are computed, [lane][step], from `ratios` alike: known before the first step, on any rank.

    Forwards are counted over both lanes, conditional first, also where only one lane runs.
    """
    steps = len(ratios[0])
    retained = int(2 * steps * settings.retention)
    plan = []
    for lane, of_lane in enumerate(ratios):
        computed: list[bool] = []
        product, run, error = 1.0, 0, 0.0
        for step, ratio in enumerate(of_lane):
            if 2 * step + lane < retained or step >= steps - settings.last:
                computed.append(True)
                continue
            product, run = product * ratio, run + 1
            error += abs(1 - product)
            skip = step > 0 and error < settings.threshold and run <= settings.max_run
            if not skip:
                product, run, error = 1.0, 0, 0.0
            computed.append(not skip)
        plan.append(computed)
    return plan


class MagCache:
    """A `StepCache` that follows a plan."""

    def __init__(self, plan: list[list[bool]]) -> None:
        self.plan = plan
        self._residuals: dict[int, Residual] = {}

    def velocity(self, forward: Forward) -> Latents:
        if not self.plan[forward.lane][forward.step]:
            return forward.head(self._residuals[forward.lane].onto(forward.embed_only()))
        before = forward.embed()
        after = forward.blocks(before)
        self._residuals[forward.lane] = Residual.between(before, after)
        return forward.head(after)

    def report(self) -> dict[str, Any]:
        return counts(self.plan)
