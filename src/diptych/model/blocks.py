"""The two kinds of block: text towers, and the fused block in which picture and sound meet."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor, nn

from diptych.attention.roles import Attend, Role
from diptych.model.config import TransformerConfig
from diptych.model.fp8 import takes_rows
from diptych.model.layers import Attention, FeedForward, Modulation
from diptych.model.ops import (
    Rope,
    gated,
    gated_scale_shift,
    gated_scale_shift_rows,
    scale_shift,
    scale_shift_rows,
)


class BlockModulation(NamedTuple):
    """Everything one fused block takes from time: float32 (B, 9D), (B, 9Da), (B, 2D + Da), (B, 2Da + D).

    The last three are `None` when the clip has no sound. Parts are ordered shift, scale, gate.
    """

    video: Tensor
    audio: Tensor | None
    va: Tensor | None
    av: Tensor | None


class TextBlock(nn.Module):
    """Self-attention and feed-forward over the text of one modality."""

    def __init__(self, width: int, time_dim: int, ff: int, head_dim: int) -> None:
        super().__init__()
        self.text_modulation = Modulation(time_dim, 6 * width)
        self.attn = Attention(Role.TEXT_SELF, width, head_dim)
        self.feed_forward = FeedForward(width, ff)

    def forward(self, x: Tensor, modulation: Tensor, rope: Rope, key_mask: Tensor | None, attend: Attend) -> Tensor:
        shift, scale, gate, ff_shift, ff_scale, ff_gate = modulation.chunk(6, dim=-1)
        y = self.attn(attend, scale_shift(x, shift, scale), rope_q=rope, rope_k=rope, key_mask=key_mask)
        x, normed = gated_scale_shift(x, y, gate, ff_shift, ff_scale)
        return gated(x, self.feed_forward(normed), ff_gate, own=True)


class StreamBlock(nn.Module):
    """The layers that one modality owns in a fused block."""

    def __init__(self, self_role: Role, text_role: Role, width: int, time_dim: int, ff: int, head_dim: int) -> None:
        super().__init__()
        self.visual_modulation = Modulation(time_dim, 9 * width)
        self.self_attention = Attention(self_role, width, head_dim)
        self.cross_attention = Attention(text_role, width, head_dim)
        self.feed_forward = FeedForward(width, ff)


class FusedBlock(nn.Module):
    """Self-attention, text, each other, feed-forward: for video and audio, in the order of the released weights.

    Three things that are easy to get wrong: keys and values of the cross-modal attentions are the tensors that
    entered the text attentions; both cross-modal queries are taken before either residual is added; and the gates
    are crossed (the gate on video comes from the audio-to-video modulation).
    """

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        c = config
        self.widths = (c.model_dim, c.model_dim_a)
        self.video_dec_block = StreamBlock(
            Role.VISUAL_SELF, Role.VISUAL_TEXT, c.model_dim, c.time_dim, c.ff_dim, c.head_dim
        )
        self.audio_dec_block = StreamBlock(
            Role.AUDIO_SELF, Role.AUDIO_TEXT, c.model_dim_a, c.time_dim_a, c.ff_dim_a, c.head_dim
        )
        self.va_cross_attention = Attention(Role.VIDEO_FROM_AUDIO, c.model_dim, c.head_dim, c.model_dim_a)
        self.av_cross_attention = Attention(Role.AUDIO_FROM_VIDEO, c.model_dim_a, c.head_dim, c.model_dim)
        self.va_modulation = Modulation(c.time_dim, 2 * c.model_dim + c.model_dim_a)
        self.av_modulation = Modulation(c.time_dim_a, 2 * c.model_dim_a + c.model_dim)

    @property
    def fp8(self) -> bool:
        """Whether the products on video tokens are quantised; all of a block are, or none."""
        return takes_rows(self.va_cross_attention.to_query)

    def modulations(self, time_video: Tensor, time_audio: Tensor | None) -> BlockModulation:
        """All that this block takes from the time vectors; with `fix_modulation` each stream uses its own."""
        video = self.video_dec_block.visual_modulation(time_video)
        if time_audio is None:
            return BlockModulation(video, None, None, None)
        return BlockModulation(
            video,
            self.audio_dec_block.visual_modulation(time_audio),
            self.va_modulation(time_video),
            self.av_modulation(time_audio),
        )

    def forward(
        self,
        video: Tensor,
        audio: Tensor | None,
        text_video: Tensor,
        text_audio: Tensor | None,
        modulation: BlockModulation,
        rope_video: Rope,
        rope_audio: Rope | None,
        key_mask: Tensor | None,
        attend: Attend,
        own: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Both streams after this block. own: the caller reads neither `video` nor `audio` again, so that they may be
        written over; what is made in here always is."""
        v = self.video_dec_block
        # What enters the products on video tokens: in fp8 it is quantised by the kernel that makes it.
        to_linear, gated_to_linear = (
            (scale_shift_rows, gated_scale_shift_rows) if self.fp8 else (scale_shift, gated_scale_shift)
        )
        shift, scale, gate, t_shift, t_scale, t_gate, f_shift, f_scale, f_gate = modulation.video.chunk(9, dim=-1)

        y = v.self_attention(attend, to_linear(video, shift, scale), rope_q=rope_video, rope_k=rope_video)
        video, video_pre = gated_to_linear(video, y, gate, t_shift, t_scale, own=own)
        del y
        video_text = v.cross_attention(attend, video_pre, text_video, key_mask=key_mask)

        if audio is None:
            video, normed = gated_to_linear(video, video_text, t_gate, f_shift, f_scale, own=True)
            del video_pre, video_text
            return gated(video, v.feed_forward(normed), f_gate, own=True), None

        assert text_audio is not None and rope_audio is not None
        assert modulation.audio is not None and modulation.va is not None and modulation.av is not None
        a = self.audio_dec_block
        D, Da = self.widths
        shift, scale, gate, at_shift, at_scale, at_gate, af_shift, af_scale, af_gate = modulation.audio.chunk(9, dim=-1)
        va_shift, va_scale, gate_on_audio = modulation.va.split((D, D, Da), dim=-1)
        av_shift, av_scale, gate_on_video = modulation.av.split((Da, Da, D), dim=-1)

        y = a.self_attention(attend, scale_shift(audio, shift, scale), rope_q=rope_audio, rope_k=rope_audio)
        audio, audio_pre = gated_scale_shift(audio, y, gate, at_shift, at_scale, own=own)
        audio_text = a.cross_attention(attend, audio_pre, text_audio, key_mask=key_mask)

        # What is read no more is let go of at once: a stream of video is 0.4 GB in Pro.
        audio, audio_query = gated_scale_shift(audio, audio_text, at_gate, av_shift, av_scale, own=True)
        video, video_query = gated_to_linear(video, video_text, t_gate, va_shift, va_scale, own=True)
        del video_text
        from_video = self.av_cross_attention(attend, audio_query, video_pre, rope_q=rope_audio, rope_k=rope_video)
        del video_pre
        from_audio = self.va_cross_attention(attend, video_query, audio_pre, rope_q=rope_video, rope_k=rope_audio)
        del video_query

        video, normed = gated_to_linear(video, from_audio, gate_on_video, f_shift, f_scale, own=True)
        del from_audio
        video = gated(video, v.feed_forward(normed), f_gate, own=True)
        audio, normed = gated_scale_shift(audio, from_video, gate_on_audio, af_shift, af_scale, own=True)
        audio = gated(audio, a.feed_forward(normed), af_gate, own=True)
        return video, audio


class BlockElsewhere(nn.Module):
    """Stands where another rank holds the block: it has no weights and cannot be run."""

    def modulations(self, time_video: Tensor, time_audio: Tensor | None) -> BlockModulation:
        """Nothing, in the place of a block's."""
        return BlockModulation(time_video.new_empty(0), None, None, None)
