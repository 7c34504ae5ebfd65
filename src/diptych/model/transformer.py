"""The Kandinsky 6 transformer in three phases: embed, blocks, head.

What wants to come between the phases (sharding, caches, pipeline stages, offload) has its seam in `Streams`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from diptych.attention.roles import Attend
from diptych.model.blocks import BlockElsewhere, BlockModulation, FusedBlock, TextBlock
from diptych.model.config import TransformerConfig
from diptych.model.layers import Modulation, NormedLinear, PatchEmbeddings, TimeEmbeddings
from diptych.model.ops import LAYER_NORM_EPS, Rope, scale_shift
from diptych.model.rope import rope_1d, rope_3d


@dataclass(frozen=True)
class TextContext:
    """One prompt batch as the transformer wants it, projected once a request.

    text_video (B, L, D), text_audio (B, L, Da): working dtype, before the text towers (those depend on time).
    pooled_video, pooled_audio (B, time_dim): float32. mask (B, L): True where a token is real; None when all are.
    """

    text_video: Tensor
    text_audio: Tensor
    pooled_video: Tensor
    pooled_audio: Tensor
    rope: Rope
    mask: Tensor | None


@dataclass(frozen=True)
class Grid:
    """Where the tokens of a clip sit: made once a request.

    T counts latent frames without the tail; rows and columns count patches. rope_audio is None without sound.
    """

    T: int
    rows: int
    columns: int
    tail: bool
    rope_video: Rope
    rope_audio: Rope | None

    @property
    def tokens(self) -> int:
        return (self.T + self.tail) * self.rows * self.columns


class Modulations(NamedTuple):
    """All that depends on time and pooled text, float32: it may be made ahead of the steps, or anywhere else."""

    text_video: list[Tensor]
    text_audio: list[Tensor]
    blocks: list[BlockModulation]
    head_video: Tensor
    head_audio: Tensor | None


@dataclass(frozen=True)
class Streams:
    """What passes from block to block.

    video (B, S, D), audio (B, A, Da) or None: the two panels. Texts are after their towers. A rank of a sharded
    run holds its own slice of `video` and `rope_video`; everything else is whole on every rank.
    """

    video: Tensor
    audio: Tensor | None
    text_video: Tensor
    text_audio: Tensor | None
    modulations: Modulations
    rope_video: Rope
    rope_audio: Rope | None
    mask: Tensor | None


class VideoHead(nn.Module):
    """AdaLN and a linear layer to (B, S, 4 * out), ordered (channel, row, column) within a patch."""

    def __init__(self, width: int, time_dim: int, out: int) -> None:
        super().__init__()
        self.modulation = Modulation(time_dim, 2 * width)
        self.out_layer = nn.Linear(width, 4 * out)

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        shift, scale = modulation.chunk(2, dim=-1)
        out: Tensor = self.out_layer(scale_shift(x, shift, scale))
        return out


class AudioHead(nn.Module):
    """As the video head, with a second normalisation before the linear layer: the weights were trained so."""

    def __init__(self, width: int, time_dim: int, out: int) -> None:
        super().__init__()
        self.modulation = Modulation(time_dim, 2 * width)
        self.out_layer = nn.Linear(width, out)

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        shift, scale = modulation.chunk(2, dim=-1)
        x = scale_shift(x, shift, scale)
        x = nn.functional.layer_norm(x.float(), x.shape[-1:], eps=LAYER_NORM_EPS).to(x.dtype)
        out: Tensor = self.out_layer(x)
        return out


class Transformer(nn.Module):
    """Parameter names equal the checkpoint's. Latents are channel-last; timesteps run from 0 to 1000."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        c = self.config = config
        self.visual_embeddings = PatchEmbeddings(c.visual_in, c.model_dim)
        if c.visual_token_type_num_embeddings:
            self.visual_token_type_embeddings = nn.Embedding(c.visual_token_type_num_embeddings, c.model_dim)
        self.audio_embeddings = NormedLinear(c.in_audio_dim, c.model_dim_a)
        self.video_time_embeddings = TimeEmbeddings(c.model_dim, c.time_dim)
        self.audio_time_embeddings = TimeEmbeddings(c.model_dim_a, c.time_dim_a)
        self.video_text_embeddings = NormedLinear(c.in_text_dim, c.model_dim)
        self.audio_text_embeddings = NormedLinear(c.in_text_dim, c.model_dim_a)
        self.video_pooled_text_embeddings = NormedLinear(c.in_text_dim2, c.time_dim)
        self.audio_pooled_text_embeddings = NormedLinear(c.in_text_dim2, c.time_dim_a)
        self.video_text_transformer_blocks = nn.ModuleList(
            TextBlock(c.model_dim, c.time_dim, c.ff_dim, c.head_dim) for _ in range(c.num_text_blocks)
        )
        self.audio_text_transformer_blocks = nn.ModuleList(
            TextBlock(c.model_dim_a, c.time_dim_a, c.ff_dim_a, c.head_dim) for _ in range(c.num_text_blocks)
        )
        self.visual_transformer_blocks = nn.ModuleList(FusedBlock(c) for _ in range(c.num_visual_blocks))
        self.out_layer = VideoHead(c.model_dim, c.time_dim, c.out_visual_dim)
        self.audio_out_layer = AudioHead(c.model_dim_a, c.time_dim_a, c.out_audio_dim)

    @property
    def dtype(self) -> torch.dtype:
        """The working dtype: that of the matrix products."""
        return self.out_layer.out_layer.weight.dtype

    @property
    def text_towers(self) -> tuple[Sequence[TextBlock], Sequence[TextBlock]]:
        """The text blocks of video and of audio."""
        towers = (self.video_text_transformer_blocks, self.audio_text_transformer_blocks)
        return cast(tuple[Sequence[TextBlock], Sequence[TextBlock]], towers)

    @property
    def fused_blocks(self) -> Sequence[FusedBlock]:
        return cast(Sequence[FusedBlock], self.visual_transformer_blocks)

    def hold(self, blocks: range) -> None:
        """Let go of all fused blocks but these: other ranks hold them. The names of what stays do not change."""
        for index in range(len(self.visual_transformer_blocks)):
            if index not in blocks:
                self.visual_transformer_blocks[index] = BlockElsewhere()

    @property
    def held_blocks(self) -> Sequence[FusedBlock]:
        """The fused blocks that are here."""
        return [block for block in self.fused_blocks if isinstance(block, FusedBlock)]

    # -- once a request ------------------------------------------------------------------------------------------

    def context(self, text_BLE: Tensor, pooled_BE: Tensor, mask_BL: Tensor | None) -> TextContext:
        """Project text features (B, L, in_text_dim) and pooled features (B, in_text_dim2)."""
        rope = rope_1d(text_BLE.shape[1], self.config.head_dim, text_BLE.device)
        return TextContext(
            self.video_text_embeddings(text_BLE).to(self.dtype),
            self.audio_text_embeddings(text_BLE).to(self.dtype),
            self.video_pooled_text_embeddings(pooled_BE),
            self.audio_pooled_text_embeddings(pooled_BE),
            rope,
            mask_BL,
        )

    def grid(self, T: int, Y: int, X: int, A: int, *, tail: bool, device: torch.device) -> Grid:
        """Token positions for T x Y x X latents and A audio latents (0: no sound); `tail` adds the reference frame."""
        c = self.config
        video = rope_3d(T, Y // 2, X // 2, tail=tail, axes_dims=c.axes_dims, scale_factor=c.scale_factor, device=device)
        audio = rope_1d(A, c.head_dim, device, c.audio_freqs_scaling) if A else None
        return Grid(T, Y // 2, X // 2, tail, video, audio)

    # -- once a step ---------------------------------------------------------------------------------------------

    def time_vectors(self, timestep_B: Tensor, context: TextContext, *, audio: bool) -> tuple[Tensor, Tensor | None]:
        """Timestep and pooled text in one vector a modality, float32 (B, time_dim); audio's is None without sound."""
        assert timestep_B.dtype == torch.float32, "a half-precision timestep is off by up to 2 of 1000"
        time_video = self.video_time_embeddings(timestep_B) + context.pooled_video
        return time_video, self.audio_time_embeddings(timestep_B) + context.pooled_audio if audio else None

    def modulations(
        self, timestep_B: Tensor, context: TextContext, *, audio: bool, blocks: int | None = None, texts: bool = True
    ) -> Modulations:
        """Everything that time decides, for every layer, float32. timestep (B,) float32 on the scale 0..1000.

        blocks, texts: a forward that runs only the first fused blocks, or no text towers, needs no others' modulations.
        """
        time_video, time_audio = self.time_vectors(timestep_B, context, audio=audio)
        tower_video, tower_audio = self.text_towers if texts else ([], [])
        return Modulations(
            [block.text_modulation(time_video) for block in tower_video],
            [] if time_audio is None else [block.text_modulation(time_audio) for block in tower_audio],
            [block.modulations(time_video, time_audio) for block in self.fused_blocks[:blocks]],
            self.out_layer.modulation(time_video),
            None if time_audio is None else self.audio_out_layer.modulation(time_audio),
        )

    def tokens(self, video_BTYXC: Tensor, audio_BAC: Tensor | None, grid: Grid) -> tuple[Tensor, Tensor | None]:
        """Latents to tokens, (B, S, D) and (B, A, Da). video has the channels noisy, condition, mask."""
        video = self.visual_embeddings(video_BTYXC.to(self.dtype))
        if grid.tail:
            types = torch.zeros(grid.T + 1, dtype=torch.long, device=video.device)
            types[-1] = 1
            added = self.visual_token_type_embeddings(types).to(video.dtype)
            video = video + added.repeat_interleave(grid.rows * grid.columns, dim=0)
        return video, None if audio_BAC is None else self.audio_embeddings(audio_BAC).to(self.dtype)

    def embed(
        self,
        video_BTYXC: Tensor,
        audio_BAC: Tensor | None,
        context: TextContext,
        grid: Grid,
        modulations: Modulations,
        attend: Attend,
    ) -> Streams:
        """Latents and text to streams. video has the channels noisy, condition, mask, and T + tail frames."""
        video, audio = self.tokens(video_BTYXC, audio_BAC, grid)
        tower_video, tower_audio = self.text_towers
        text_video, text_audio = context.text_video, None
        for block, modulation in zip(tower_video, modulations.text_video, strict=True):
            text_video = block(text_video, modulation, context.rope, context.mask, attend)
        if audio is not None:
            text_audio = context.text_audio
            for block, modulation in zip(tower_audio, modulations.text_audio, strict=True):
                text_audio = block(text_audio, modulation, context.rope, context.mask, attend)
        return Streams(
            video, audio, text_video, text_audio, modulations, grid.rope_video, grid.rope_audio, context.mask
        )

    def blocks(
        self, streams: Streams, attend: Attend, start: int = 0, stop: int | None = None, *, own: bool = False
    ) -> Streams:
        """Fused blocks `start..stop`. own: the video and audio of `streams` may be written over."""
        video, audio, s = streams.video, streams.audio, streams
        stop = len(self.fused_blocks) if stop is None else stop
        for index in range(start, stop):
            video, audio = self.fused_blocks[index](
                video,
                audio,
                s.text_video,
                s.text_audio,
                s.modulations.blocks[index],
                s.rope_video,
                s.rope_audio,
                s.mask,
                attend,
                own or index > start,
            )
        return replace(streams, video=video, audio=audio)

    def head(self, streams: Streams) -> tuple[Tensor, Tensor | None]:
        """Streams to velocities: video tokens (B, S, 4 * out_visual_dim) and audio (B, A, out_audio_dim) or None."""
        m = streams.modulations
        video = self.out_layer(streams.video, m.head_video)
        if streams.audio is None:
            return video, None
        return video, self.audio_out_layer(streams.audio, m.head_audio)

    @staticmethod
    def unpatchify(tokens_BSC: Tensor, grid: Grid) -> Tensor:
        """(B, S, 4C) with patches ordered (channel, row, column) to (B, T + tail, Y, X, C)."""
        B = tokens_BSC.shape[0]
        x = tokens_BSC.reshape(B, grid.T + grid.tail, grid.rows, grid.columns, -1, 2, 2)
        return x.permute(0, 1, 2, 5, 3, 6, 4).reshape(B, grid.T + grid.tail, 2 * grid.rows, 2 * grid.columns, -1)

    def forward(
        self,
        video_BTYXC: Tensor,
        audio_BAC: Tensor | None,
        timestep_B: Tensor,
        context: TextContext,
        grid: Grid,
        attend: Attend,
    ) -> tuple[Tensor, Tensor | None]:
        """One velocity: video (B, T + tail, Y, X, out_visual_dim), audio (B, A, out_audio_dim) or None."""
        modulations = self.modulations(timestep_B, context, audio=audio_BAC is not None)
        streams = self.embed(video_BTYXC, audio_BAC, context, grid, modulations, attend)
        video, audio = self.head(self.blocks(streams, attend, own=True))
        return self.unpatchify(video, grid), audio
