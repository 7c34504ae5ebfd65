"""From latents and a timestep to a velocity: the transformer's three phases, with what stands between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from diptych.attention.roles import Attend
from diptych.memory.tables import ModulationTables
from diptych.model.transformer import Grid, TextContext, Transformer
from diptych.parallel.guidance import guided
from diptych.sampling.caches.base import StepCache
from diptych.sampling.forward import Forward, Shard
from diptych.sampling.latents import Latents
from diptych.sampling.pipefusion import PipeFusion


class Combine(Protocol):
    """Guidance: given how to compute each lane, returns `uncond + g * (cond - uncond)` of both streams."""

    def __call__(self, lanes: Sequence[Callable[[], Latents]], guidance: float) -> Latents: ...


def combine_serial(lanes: Sequence[Callable[[], Latents]], guidance: float) -> Latents:
    """Both lanes here, one after the other, conditional first."""
    if len(lanes) == 1:
        return lanes[0]()
    cond, uncond = (lane() for lane in lanes)
    video = guided(cond.video, uncond.video, guidance)
    if cond.audio is None or uncond.audio is None:
        return Latents(video, None)
    return Latents(video, guided(cond.audio, uncond.audio, guidance))


@dataclass
class Denoiser:
    """Velocities for one batch of requests.

    contexts: the conditional lane, and with guidance the unconditional one.
    first_frame (B, Y, X, C): clean latents of the reference image, appended as the last frame of every forward.
    tables: modulations computed ahead for the timesteps to come; without, each forward computes its own.
    cache: decides which forwards are computed and which are predicted; without, all are computed.
    forwards: how many were asked for so far, over all lanes, wherever they ran; for the report.
    pipe: runs the blocks on several ranks, stage by stage; without, all of them are here.
    exact, exact_steps, exact_blocks: who attends in the first steps and in these blocks, where `attend` approximates.
    """

    model: Transformer
    attend: Attend
    grid: Grid
    contexts: list[TextContext]
    guidance: float
    first_frame: Tensor | None = None
    shard: Shard | None = None
    combine: Combine = combine_serial
    forwards: int = 0
    tables: ModulationTables | None = None
    cache: StepCache | None = None
    pipe: PipeFusion | None = None
    exact: Attend | None = None
    exact_steps: int = 0
    exact_blocks: frozenset[int] = frozenset()

    def velocity(self, latents: Latents, timestep: Tensor) -> Latents:
        """Guided velocity at `timestep` (0-dim float32, 0..1000): float32 or working dtype, shapes of `latents`
        (times the grid of the distilled heads in the last axis)."""
        video = self._input(latents.video)
        step = self.forwards // len(self.contexts)
        self.forwards += len(self.contexts)
        forwards = [
            self.forward(video, latents, timestep, context, lane, step) for lane, context in enumerate(self.contexts)
        ]
        if self.pipe is not None:
            return self.combine(self.pipe.lanes(forwards), self.guidance)
        run = Forward.all if self.cache is None else self.cache.velocity
        return self.combine([partial(run, forward) for forward in forwards], self.guidance)

    def _input(self, video: Tensor) -> Tensor:
        """Channels noisy, condition (always zero), mask; with the clean reference frame pinned behind the others."""
        noisy = video if self.first_frame is None else torch.cat([video, self.first_frame[:, None]], dim=1)
        mask = torch.zeros_like(noisy[..., :1])
        if self.first_frame is not None:
            mask[:, -1] = 1
        return torch.cat([noisy, torch.zeros_like(noisy), mask], dim=-1)

    def lane(self, video: Tensor, audio: Tensor | None, timestep: Tensor, context: TextContext) -> Latents:
        """The velocity of one lane, computed, given video with all its channels."""
        noisy = Latents(video[..., : self.model.config.in_visual_dim], audio)
        return self.forward(video, noisy, timestep, context).all()

    def forward(
        self, video: Tensor, latents: Latents, timestep: Tensor, context: TextContext, lane: int = 0, step: int = 0
    ) -> Forward:
        return Forward(
            self.model,
            self.exact if self.exact is not None and step < self.exact_steps else self.attend,
            self.grid,
            context,
            latents,
            video,
            timestep,
            lane,
            step,
            self.shard,
            self.tables,
            {} if self.exact is None else dict.fromkeys(self.exact_blocks, self.exact),
        )
