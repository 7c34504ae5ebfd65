"""What a step cache is, and what all of them share: residuals, and decisions that every rank takes alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from diptych.model.transformer import Streams
from diptych.parallel.agreement import Agreement
from diptych.sampling.forward import Forward
from diptych.sampling.latents import Latents


class StepCache(Protocol):
    """Made anew for every request, on every rank; called for each lane of each step in order."""

    def velocity(self, forward: Forward) -> Latents:
        """The velocity of a forward, computed or predicted. What is computed has the bits it has without a cache."""
        ...

    def report(self) -> dict[str, Any]:
        """What the report tells: forwards computed and total of each lane. All ranks call it together, at the end."""
        ...


@dataclass(frozen=True)
class Known:
    """What a calibration says about a checkpoint, for one request.

    ratios[lane][step]: mean norm of a step's residual over that of the step before; 1 at the first.
    polynomial: coefficients, highest power first, from the relative change of the first block's input to that of the
    velocity; span: the changes that were seen, outside of which it says nothing.
    source: where it is from, for the report.
    """

    ratios: tuple[tuple[float, ...], ...] = ()
    polynomial: tuple[float, ...] = ()
    span: tuple[float, float] = (0.0, 0.0)
    source: str = ""


@dataclass(frozen=True)
class Run:
    """The request a cache works for: lanes of guidance, steps, how ranks agree, and what is known."""

    lanes: int
    steps: int
    agreement: Agreement = field(default_factory=Agreement)
    known: Known = field(default_factory=Known)


class Residual(NamedTuple):
    """What blocks add to both streams; video (B, s, D) of this rank's tokens."""

    video: Tensor
    audio: Tensor | None

    @classmethod
    def between(cls, before: Streams, after: Streams) -> Residual:
        if before.audio is None or after.audio is None:
            return cls(after.video - before.video, None)
        return cls(after.video - before.video, after.audio - before.audio)

    def onto(self, streams: Streams) -> Streams:
        audio = streams.audio if streams.audio is None or self.audio is None else streams.audio + self.audio
        return replace(streams, video=streams.video + self.video, audio=audio)

    def with_(self, other: Residual, combine: Callable[[Tensor, Tensor], Tensor]) -> Residual:
        audio = None if self.audio is None or other.audio is None else combine(self.audio, other.audio)
        return Residual(combine(self.video, other.video), audio)


class Steps:
    """Decides step by step, once for all lanes and ranks.

    The first `first` and the last `last` steps are computed, and so is the step after `max_run` predicted ones.
    """

    def __init__(self, run: Run, *, first: int, last: int, max_run: int) -> None:
        self.run, self.first, self.last, self.max_run = run, max(first, 1), last, max_run
        self.computed: list[bool] = []
        self._skipped = 0

    def decide(self, step: int, ask: Callable[[], bool]) -> bool:
        """Whether `step` is computed. `ask` is called at most once a step, on all ranks or on none, and must answer
        alike on all of them."""
        if step == len(self.computed):
            bound = step < self.first or step >= self.run.steps - self.last or self._skipped >= self.max_run
            self.computed.append(bound or ask())
            self._skipped = 0 if self.computed[-1] else self._skipped + 1
        return self.computed[step]

    def report(self) -> dict[str, Any]:
        return counts([self.computed] * self.run.lanes)


def counts(computed: list[list[bool]]) -> dict[str, Any]:
    return {"lanes": [{"computed": sum(lane), "total": len(lane)} for lane in computed]}
