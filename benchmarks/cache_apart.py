"""Step caches that decide for each clip of a batch alone, at the speed of a batch: what a clip would get on its own.

In the engine the clips of a batch share their decisions. To measure a cache on many clips, here each clip has a cache
of its own, which works on its row; a part of the transformer is computed for all rows when the first clip asks for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from diptych.model.transformer import Streams
from diptych.parallel.agreement import Agreement
from diptych.request import ResolvedRequest
from diptych.sampling.caches import CachePlan, Settings
from diptych.sampling.caches.base import Run, StepCache
from diptych.sampling.forward import Forward
from diptych.sampling.latents import Latents


class Whole:
    """One lane's forward for all clips, each part of it computed once, when it is asked for."""

    def __init__(self, forward: Forward) -> None:
        self.forward, self.clips = forward, len(forward.video)
        self._behind: list[Streams] = []

    @cached_property
    def before(self) -> Streams:
        return self.forward.embed()

    def upto(self, block: int) -> Streams:
        """What stands behind the first `block` blocks."""
        while len(self._behind) < block:
            done = len(self._behind)
            self._behind.append(self.forward.blocks(self.upto(done), done, done + 1))
        return self._behind[block - 1] if block else self.before

    @cached_property
    def after(self) -> Streams:
        return self.upto(len(self.forward.model.fused_blocks))

    @cached_property
    def velocity(self) -> Latents:
        return self.forward.head(self.after)

    @cached_property
    def bare(self) -> Streams:
        return self.forward.embed_only()

    @cached_property
    def entering(self) -> Tensor:
        return self.forward.first_input()

    def predicted(self, rows: Sequence[int], streams: Sequence[Streams]) -> list[Latents]:
        """The velocities of the rows whose last streams a cache made up."""
        video = self.bare.video.clone()
        video[list(rows)] = torch.cat([s.video for s in streams])
        audio = self.bare.audio
        if audio is not None:
            audio = audio.clone()
            audio[list(rows)] = torch.cat([cast(Tensor, s.audio) for s in streams])
        out = self.forward.head(replace(self.bare, video=video, audio=audio))
        return [_row(out, row) for row in rows]


class Later(NamedTuple):
    """Streams of one clip whose head is still to be computed, with those of the others."""

    streams: Streams


class Row:
    """What one clip's cache takes for its forward."""

    def __init__(self, whole: Whole, row: int) -> None:
        self.whole, self.row = whole, row
        self.lane, self.step = whole.forward.lane, whole.forward.step
        self.latents, self.model = _row(whole.forward.latents, row), whole.forward.model
        self._given: list[Streams] = []
        self._after: Streams | None = None

    def embed(self) -> Streams:
        return self._of(self.whole.before)

    def embed_only(self) -> Streams:
        return self._of(self.whole.bare)

    def blocks(self, streams: Streams, start: int = 0, stop: int | None = None) -> Streams:
        """No cache gives the blocks anything but what the model computed before them."""
        assert any(streams.video is given.video for given in self._given)
        if stop is not None:
            return self._of(self.whole.upto(stop))
        self._after = self._of(self.whole.after)
        return self._after

    def head(self, streams: Streams) -> Latents | Later:
        return self.all() if streams is self._after else Later(streams)

    def all(self) -> Latents:
        return _row(self.whole.velocity, self.row)

    def first_input(self) -> Tensor:
        return self.whole.entering[self.row : self.row + 1]

    def _of(self, streams: Streams) -> Streams:
        video, audio = _row(Latents(streams.video, streams.audio), self.row)
        self._given.append(replace(streams, video=video, audio=audio))
        return self._given[-1]


class Apart:
    """A `StepCache` of a batch: one cache a clip. kept: the forwards, where they are to be kept."""

    def __init__(self, caches: Sequence[StepCache], keep: bool = False) -> None:
        self.caches, self.keep = caches, keep
        self.kept: list[Whole] = []

    def velocity(self, forward: Forward) -> Latents:
        whole = Whole(forward)
        if self.keep:
            self.kept.append(whole)
        found = [cache.velocity(cast(Forward, Row(whole, row))) for row, cache in enumerate(self.caches)]
        rows = [row for row, out in enumerate(found) if isinstance(out, Later)]
        if rows:
            streams = [cast(Later, found[row]).streams for row in rows]
            for row, out in zip(rows, whole.predicted(rows, streams), strict=True):
                found[row] = out
        video = _together([out.video for out in found])
        return Latents(
            video, None if forward.latents.audio is None else _together([cast(Tensor, x.audio) for x in found])
        )

    def report(self) -> dict[str, Any]:
        """Counts of all clips together; `clips` has each clip's own report."""
        of_clips = [cache.report() for cache in self.caches]
        lanes = [
            {name: sum(report["lanes"][lane][name] for report in of_clips) for name in ("computed", "total")}
            for lane in range(len(of_clips[0]["lanes"]))
        ]
        return {"lanes": lanes, "clips": of_clips}


@dataclass(frozen=True)
class ApartPlan(CachePlan):
    """A plan for a batch of `clips` that decide alone. started: the caches of each job, the last one last."""

    clips: int = 1
    keep: bool = False
    started: list[Apart] = field(default_factory=list)

    def start(self, resolved: ResolvedRequest, agreement: Agreement) -> StepCache:
        run = Run(1 + resolved.guided, resolved.steps, agreement, self._known(resolved))
        self.started.append(Apart([self.settings.start(run) for _ in range(self.clips)], self.keep))
        return self.started[-1]


def replay(settings: Settings, run: Run, kept: Sequence[Whole]) -> float:
    """The share of forwards that a cache would compute if what it predicts were right: its decisions on exact clips."""
    computed = total = 0
    for row in range(kept[0].clips):
        cache = settings.start(run)
        for whole in kept:
            cache.velocity(cast(Forward, Row(whole, row)))
        lanes = cache.report()["lanes"]
        computed += sum(lane["computed"] for lane in lanes)
        total += sum(lane["total"] for lane in lanes)
    return computed / total


def _row(latents: Latents, row: int) -> Latents:
    video, audio = latents
    return Latents(video[row : row + 1], None if audio is None else audio[row : row + 1])


def _together(parts: Sequence[Tensor]) -> Tensor:
    alike = len({part.dtype for part in parts}) == 1
    return torch.cat([part if alike else part.float() for part in parts])
