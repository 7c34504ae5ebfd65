"""First-block cache: when the first block does nearly what it did, the others will too.

The rule of ParaAttention's first-block cache, on both streams of the fused block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from diptych.sampling.caches.base import Residual, Run, Steps
from diptych.sampling.forward import Forward
from diptych.sampling.latents import Latents


@dataclass(frozen=True)
class FirstBlockSettings:
    """threshold: relative change of the first block's residual, in whichever stream it is larger; max_run: steps
    predicted in a row; retention: share of steps computed first; last: steps computed at the end."""

    threshold: float = 0.08
    max_run: int = 3
    retention: float = 0.2
    last: int = 1
    name: ClassVar[str] = "firstblock"
    needs: ClassVar[str] = ""

    def start(self, run: Run) -> FirstBlock:
        return FirstBlock(self, run)


class FirstBlock:
    """Decided on the conditional lane, from sums over all ranks that hold its tokens; the other lane follows.

    A predicted forward runs the text towers and the first block.
    """

    def __init__(self, settings: FirstBlockSettings, run: Run) -> None:
        self.threshold, self.agreement = settings.threshold, run.agreement
        first = int(run.steps * settings.retention)
        self.steps = Steps(run, first=first, last=settings.last, max_run=settings.max_run)
        self._first: dict[int, Residual] = {}
        self._rest: dict[int, Residual] = {}

    def velocity(self, forward: Forward) -> Latents:
        lane, before = forward.lane, forward.embed()
        after_first = forward.blocks(before, 0, 1)
        first = Residual.between(before, after_first)
        if not self.steps.decide(forward.step, lambda: self._changed(lane, first)):
            return forward.head(self._rest[lane].onto(after_first))
        after = forward.blocks(after_first, 1)
        self._first[lane], self._rest[lane] = first, Residual.between(after_first, after)
        return forward.head(after)

    def _changed(self, lane: int, first: Residual) -> bool:
        sums = [0.0] * 4
        if lane == 0:
            before = self._first[0]
            sums[:2] = _sums(first.video, before.video)
            if first.audio is not None and before.audio is not None and self.agreement.first:
                sums[2:] = _sums(first.audio, before.audio)  # every rank holds it: one speaks for all
        video, of_video, audio, of_audio = self.agreement.total(sums)
        changes = [video / of_video if of_video else 0.0, audio / of_audio if of_audio else 0.0]
        return max(changes) >= self.threshold

    def report(self) -> dict[str, Any]:
        return self.steps.report()


def _sums(now: Tensor, before: Tensor) -> tuple[float, float]:
    change, size = (now.float() - before.float()).abs().sum(), before.float().abs().sum()
    return float(change), float(size)
