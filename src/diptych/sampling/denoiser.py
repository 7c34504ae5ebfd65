"""From latents and a timestep to a velocity: the transformer's three phases, with what stands between them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from diptych.attention.roles import Attend
from diptych.memory.tables import ModulationTables
from diptych.model.ops import Rope
from diptych.model.transformer import Grid, Modulations, Streams, TextContext, Transformer
from diptych.parallel.guidance import guided
from diptych.sampling.latents import Latents


class Shard(Protocol):
    """Who holds which video tokens: `scatter` takes the local slice along an axis, `gather` restores (B, S, C)."""

    def scatter(self, tokens: Tensor, dim: int = 1) -> Tensor: ...
    def gather(self, tokens_BsC: Tensor) -> Tensor: ...


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
    forwards: how many were run so far, over all lanes, wherever they ran; for the report.
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

    def velocity(self, latents: Latents, timestep: Tensor) -> Latents:
        """Guided velocity at `timestep` (0-dim float32, 0..1000): float32 or working dtype, shapes of `latents`
        (times the grid of the distilled heads in the last axis)."""
        video = self._input(latents.video)
        self.forwards += len(self.contexts)
        lanes = [partial(self.lane, video, latents.audio, timestep, context) for context in self.contexts]
        return self.combine(lanes, self.guidance)

    def _input(self, video: Tensor) -> Tensor:
        """Channels noisy, condition (always zero), mask; with the clean reference frame pinned behind the others."""
        noisy = video if self.first_frame is None else torch.cat([video, self.first_frame[:, None]], dim=1)
        mask = torch.zeros_like(noisy[..., :1])
        if self.first_frame is not None:
            mask[:, -1] = 1
        return torch.cat([noisy, torch.zeros_like(noisy), mask], dim=-1)

    def lane(self, video: Tensor, audio: Tensor | None, timestep: Tensor, context: TextContext) -> Latents:
        model, grid = self.model, self.grid
        modulations = self._modulations(timestep, context, len(video), audio=audio is not None)
        streams = model.embed(video, audio, context, grid, modulations, self.attend)
        streams = model.blocks(self._scatter(streams), self.attend)
        video_tokens, audio_out = model.head(streams)
        if self.shard is not None:
            video_tokens = self.shard.gather(video_tokens)
        return Latents(model.unpatchify(video_tokens, grid)[:, : grid.T], audio_out)

    def _modulations(self, timestep: Tensor, context: TextContext, B: int, *, audio: bool) -> Modulations:
        if self.tables is not None:
            return self.tables.at(timestep, context)
        times = timestep.to(context.pooled_video.device, torch.float32).expand(B)
        return self.model.modulations(times, context, audio=audio)

    def _scatter(self, streams: Streams) -> Streams:
        if self.shard is None:
            return streams
        cos, sin = streams.rope_video
        rope = Rope(self.shard.scatter(cos, 0), self.shard.scatter(sin, 0))
        return replace(streams, video=self.shard.scatter(streams.video), rope_video=rope)
