"""NaviCache: how much the output will change is estimated from how much the input did, by a scalar Kalman filter.

The rule of Kandinsky 6's native code. A predicted forward runs nothing of the transformer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from diptych.sampling.caches.base import Run, Steps
from diptych.sampling.forward import Forward
from diptych.sampling.latents import Latents

PROCESS_NOISE = MEASUREMENT_NOISE = 0.05
EPS = 1e-8


@dataclass(frozen=True)
class NaviCacheSettings:
    """threshold: estimated relative change that may add up; max_run: steps predicted in a row, 0 for any number;
    align: steps computed first; last: steps computed at the end."""

    threshold: float = 0.05
    max_run: int = 0
    align: int = 10
    last: int = 1
    name: ClassVar[str] = "navicache"
    needs: ClassVar[str] = ""

    def start(self, run: Run) -> NaviCache:
        return NaviCache(self, run)


class Kalman:
    """A scalar that drifts, seen through noise. `state` is None before the first measurement."""

    def __init__(self) -> None:
        self.state: float | None = None
        self._variance = 1.0

    def measure(self, z: float) -> None:
        if self.state is None:
            self.state = z
            return
        self._variance += PROCESS_NOISE
        gain = self._variance / (self._variance + MEASUREMENT_NOISE + EPS)
        self.state += gain * (z - self.state)
        self._variance *= 1 - gain


class NaviCache:
    """Decided on the conditional lane; the other follows. One wait for the device a step."""

    def __init__(self, settings: NaviCacheSettings, run: Run) -> None:
        self.threshold, self.agreement = settings.threshold, run.agreement
        self.steps = Steps(run, first=settings.align, last=settings.last, max_run=settings.max_run or run.steps)
        self._offsets: dict[int, Latents] = {}
        self._estimate = Kalman()
        self._sum = 0.0
        self._seen: Tensor | None = None
        self._computed: tuple[Tensor, Tensor] | None = None

    def velocity(self, forward: Forward) -> Latents:
        compute = self.steps.decide(forward.step, lambda: self.agreement.decide(self._changed(forward)))
        raw = forward.latents
        if compute:
            out = forward.all()
            self._offsets[forward.lane] = _each(out, raw, 1.0, -1.0)
        else:
            out = _each(raw, self._offsets[forward.lane], 1.0, 1.0)
        if forward.lane == 0 and self.agreement.first:
            x = _flat(raw)
            if compute:
                self._learn(x, _flat(out))
            self._seen = x
        return out

    def _changed(self, forward: Forward) -> bool:
        """Whether the output has probably changed too much; only the first rank's answer counts."""
        if not self.agreement.first or self._estimate.state is None:
            return True
        assert self._seen is not None and self._computed is not None
        change, size = (_flat(forward.latents) - self._seen).abs().mean(), self._computed[1].abs().mean()
        self._sum += self._estimate.state * float(change / (size + EPS))
        return self._sum >= self.threshold

    def _learn(self, x: Tensor, out: Tensor) -> None:
        if self._computed is not None:
            x_before, out_before = self._computed
            self._estimate.measure(float((out - out_before).abs().mean() / ((x - x_before).abs().mean() + EPS)))
        self._computed, self._sum = (x, out), 0.0

    def report(self) -> dict[str, Any]:
        return self.steps.report()


def _each(a: Latents, b: Latents, of_a: float, of_b: float) -> Latents:
    video = of_a * a.video.float() + of_b * b.video.float()
    if a.audio is None or b.audio is None:
        return Latents(video, None)
    return Latents(video, of_a * a.audio.float() + of_b * b.audio.float())


def _flat(x: Latents) -> Tensor:
    parts = [x.video] if x.audio is None else [x.video, x.audio]
    return torch.cat([part.float().reshape(-1) for part in parts])
