"""Computes everything and records what the other caches have to know; `diptych calibrate` reads it from the report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from diptych.sampling.caches.base import Residual, Run, counts
from diptych.sampling.caches.teacache import relative_change
from diptych.sampling.forward import Forward
from diptych.sampling.latents import Latents


@dataclass(frozen=True)
class RecordSettings:
    """Takes no values."""

    name: ClassVar[str] = "record"
    needs: ClassVar[str] = ""

    def start(self, run: Run) -> Record:
        return Record(run)


class Record:
    """Exact. The report gets, beside the counts,

    ratios[lane][step]: mean over video tokens of |residual| / |residual of the step before|, 1 at the first step;
    pairs: of the conditional lane, for each step but the first, the relative changes of the first block's input and of
    the video velocity.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._sums = [[0.0] * run.steps for _ in range(run.lanes)]
        self._tokens = [[0.0] * run.steps for _ in range(run.lanes)]
        self._norms: dict[int, Tensor] = {}
        self._last: tuple[Tensor, Tensor] | None = None
        self._pairs: list[float] = []

    def velocity(self, forward: Forward) -> Latents:
        before = forward.embed()
        after = forward.blocks(before)
        self._magnitude(forward.lane, forward.step, Residual.between(before, after).video)
        out = forward.head(after)
        if forward.lane == 0 and self.run.agreement.first:
            now = (forward.first_input(), out.video)
            if self._last is not None:
                self._pairs += [relative_change(a, b) for a, b in zip(now, self._last, strict=True)]
            self._last = now
        return out

    def _magnitude(self, lane: int, step: int, residual_BsD: Tensor) -> None:
        norms = residual_BsD.float().norm(dim=-1)
        if lane in self._norms:
            self._sums[lane][step] = float((norms / self._norms[lane]).sum())
            self._tokens[lane][step] = norms.numel()
        self._norms[lane] = norms

    def report(self) -> dict[str, Any]:
        lanes, steps = self.run.lanes, self.run.steps
        flat = [*(x for lane in self._sums for x in lane), *(x for lane in self._tokens for x in lane)]
        total = self.run.agreement.total(flat)
        pairs = self.run.agreement.total(self._pairs or [0.0] * (2 * (steps - 1)))
        ratios = [
            [1.0, *(total[n] / total[n + lanes * steps] for n in range(lane * steps + 1, (lane + 1) * steps))]
            for lane in range(lanes)
        ]
        recorded = {"ratios": ratios, "pairs": list(zip(pairs[::2], pairs[1::2], strict=True))}
        return counts([[True] * steps] * lanes) | {"recorded": recorded}
