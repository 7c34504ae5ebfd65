"""One forward of the transformer in the phases that a step cache comes between, or leaves out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Protocol

import torch
from torch import Tensor

from diptych.attention.roles import Attend
from diptych.memory.tables import ModulationTables
from diptych.model.ops import Rope, scale_shift
from diptych.model.transformer import Grid, Modulations, Streams, TextContext, Transformer
from diptych.sampling.latents import Latents


class Shard(Protocol):
    """Who holds which video tokens: `scatter` takes the local slice along an axis, `gather` restores (B, S, C)."""

    def scatter(self, tokens: Tensor, dim: int = 1) -> Tensor: ...
    def gather(self, tokens_BsC: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Forward:
    """What one lane asks of the transformer in one step.

    lane: 0 conditional, 1 unconditional; step counts from 0.
    latents: as the sampler holds them, whole and equal on every rank.
    video (B, T + tail, Y, X, 2C + 1): the same with condition channels, mask and reference frame.
    timestep: 0-dim float32, 0..1000.
    attend_in: who attends in the blocks of these numbers, instead of `attend`.
    """

    model: Transformer
    attend: Attend
    grid: Grid
    context: TextContext
    latents: Latents
    video: Tensor
    timestep: Tensor
    lane: int = 0
    step: int = 0
    shard: Shard | None = None
    tables: ModulationTables | None = None
    attend_in: Mapping[int, Attend] = field(default_factory=dict)

    def all(self) -> Latents:
        """The velocity as the model gives it, nothing left out."""
        return self.head(self.blocks(self.embed(), own=True))

    def embed(self) -> Streams:
        """Tokens, texts behind their towers, and all modulations; video tokens are this rank's own."""
        streams = self.model.embed(
            self.video, self.latents.audio, self.context, self.grid, self._modulations(), self.attend
        )
        return self._scatter(streams)

    def embed_only(self) -> Streams:
        """The streams of a forward that runs no block: without the text towers, and time only for the heads."""
        video, audio = self.model.tokens(self.video, self.latents.audio, self.grid)
        return self._scatter(self._bare(video, audio, self._modulations(blocks=0, texts=False)))

    def first_input(self) -> Tensor:
        """What enters the first fused block's video self-attention, (B, S, D), of all ranks' tokens."""
        video, _ = self.model.tokens(self.video, None, self.grid)
        modulation = self._modulations(blocks=1, texts=False).blocks[0].video
        shift, scale = modulation.chunk(9, dim=-1)[:2]
        return scale_shift(video, shift, scale)

    def attend_of(self, block: int) -> Attend:
        """Who attends in one fused block."""
        return self.attend_in.get(block, self.attend)

    def blocks(self, streams: Streams, start: int = 0, stop: int | None = None, *, own: bool = False) -> Streams:
        """Fused blocks `start..stop`. own: the video and audio of `streams` may be written over."""
        run = range(start, len(self.model.fused_blocks) if stop is None else stop)
        for attend, part in groupby(run, self.attend_of):
            indices = list(part)
            streams = self.model.blocks(streams, attend, indices[0], indices[-1] + 1, own=own)
            own = True
        return streams

    def head(self, streams: Streams) -> Latents:
        """Streams to the velocity of all tokens, on every rank."""
        return self.whole(*self.model.head(streams))

    def whole(self, video_BsC: Tensor, audio: Tensor | None) -> Latents:
        """What the heads gave for this rank's tokens to the velocity of all tokens, on every rank."""
        video_BSC = video_BsC if self.shard is None else self.shard.gather(video_BsC)
        return Latents(self.model.unpatchify(video_BSC, self.grid)[:, : self.grid.T], audio)

    def _modulations(self, blocks: int | None = None, texts: bool = True) -> Modulations:
        if self.tables is not None:
            return self.tables.at(self.timestep, self.context)
        device = self.context.pooled_video.device
        # Filled, not copied: a copy from the host would wait for all that the device still has to do.
        times = torch.full((len(self.video),), self.timestep.item(), dtype=torch.float32, device=device)
        audio = self.latents.audio is not None
        return self.model.modulations(times, self.context, audio=audio, blocks=blocks, texts=texts)

    def _bare(self, video: Tensor, audio: Tensor | None, modulations: Modulations) -> Streams:
        context, grid = self.context, self.grid
        return Streams(
            video, audio, context.text_video, None, modulations, grid.rope_video, grid.rope_audio, context.mask
        )

    def _scatter(self, streams: Streams) -> Streams:
        if self.shard is None:
            return streams
        cos, sin = streams.rope_video
        rope = Rope(self.shard.scatter(cos, 0), self.shard.scatter(sin, 0))
        # A slice would keep all ranks' tokens in memory, and this rank's must be its own to write over.
        return replace(streams, video=self.shard.scatter(streams.video).clone(), rope_video=rope)
