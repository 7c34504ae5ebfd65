"""The stock transformer's arithmetic on its own weights, arranged for training without a compiler.

The stock module works out norms, shifts and gates in float32 over many small passes, which a small model spends most of
its time on. Here the streams stay in the dtype asked for, each shift-and-scale and each gate is one pass, and weights
are cast once. With `fused` those passes are kernels of our own (`fused.py`). `tests/toyworld` holds both, in float32,
to the stock module's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass
class Inputs:
    """video (B, T, Y, X, 33), audio (B, A, 40) or None, text (B, L, D) with mask (B, L), pooled (B, P), timestep (B,).

    frame_places (T,): rotary positions in time; token_types (B, T) or None.
    """

    video: Tensor
    audio: Tensor | None
    text: Tensor
    mask: Tensor
    pooled: Tensor
    timestep: Tensor
    frame_places: Tensor
    token_types: Tensor | None = None


_Rope = tuple[Tensor, Tensor]
"""Cosines and sines, (S, K / 2) each."""


class _Plain:
    """The passes in torch's own operations; `tools.toyworld.fused` has functions of the same names."""

    linear = staticmethod(F.linear)

    @staticmethod
    def norm_turn(x: Tensor, weight: Tensor, rope: _Rope | None) -> Tensor:
        y = F.rms_norm(x.float(), x.shape[-1:], weight)
        if rope is not None:
            turn = torch.complex(*rope)[:, None]
            y = torch.view_as_real(torch.view_as_complex(y.unflatten(-1, (-1, 2))) * turn).flatten(-2)
        return y.to(x.dtype)

    @staticmethod
    def scaled(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return torch.addcmul(shift.to(x.dtype), F.layer_norm(x, x.shape[-1:]), (scale + 1).to(x.dtype))

    @staticmethod
    def gated(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        return torch.addcmul(x, y, gate.to(x.dtype))

    @staticmethod
    def cast(values: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
        return [v.to(dtype) for v in values]


def velocity(model: nn.Module, inputs: Inputs, dtype: torch.dtype, fused: bool = False) -> tuple[Tensor, Tensor | None]:
    """Velocity of the video (B, T, Y, X, C) and of the audio (B, A, C), in `dtype`. fused: by our own kernels."""
    return _Pass(model, dtype, fused).velocity(inputs)


def _float32(name: str) -> bool:
    """Whether a parameter works in float32: time, pooled text, modulation, norms of heads."""
    return any(part in name for part in ("time_embeddings", "pooled_text", "modulation", "query_norm", "key_norm"))


class _Pass:
    """One forward: the model, its parameters in the working dtype, and what does the passes."""

    def __init__(self, model: nn.Module, dtype: torch.dtype, fused: bool) -> None:
        self.part: Any = model
        self.dtype = dtype
        self.do: Any = _Plain
        if fused:
            from tools.toyworld import fused as kernels

            self.do = kernels
        live = [p for name, p in model.named_parameters() if not _float32(name)]
        self.held = dict(zip(map(id, live), self.do.cast(live, dtype), strict=True))

    def velocity(self, inputs: Inputs) -> tuple[Tensor, Tensor | None]:
        part, dtype = self.part, self.dtype
        text, mask = inputs.text.to(dtype), inputs.mask[:, None, None, :]
        t_v, t_a = (self.time(side, inputs) for side in ("video", "audio"))
        text_v = self.tower("video", text, mask, t_v)
        vis = self.linear(part.visual_embeddings.in_layer, _patches(inputs.video.to(dtype)))
        if inputs.token_types is not None:
            # Between the two rows, for looking up leaves a backward pass that adds token by token.
            plain, marked = self.held[id(part.visual_token_type_embeddings.weight)]
            vis = vis + torch.lerp(plain, marked, inputs.token_types[:, :, None, None, None].to(dtype))
        shape = vis.shape[1:4]
        vis = vis.flatten(1, 3)
        rope_v = _rope_3d(part, inputs.frame_places, shape[1], shape[2])
        aud = text_a = rope_a = None
        if inputs.audio is not None:
            text_a = self.tower("audio", text, mask, t_a)
            aud = self.linear(part.audio_embeddings.in_layer, inputs.audio.to(dtype))
            aud = self.affine(part.audio_embeddings.norm, aud)
            rope_a = _rope_1d(part.audio_rope_embeddings, aud.shape[1])
        for block in part.visual_transformer_blocks:
            vis, aud = self.fused(block, vis, aud, (text_v, text_a), (t_v, t_a), (rope_v, rope_a), mask)
        shift, scale = _modulation(part.out_layer.modulation, t_v).chunk(2, dim=-1)
        out = self.linear(part.out_layer.out_layer, self.do.scaled(vis, shift, scale)).unflatten(1, shape)
        B, T, Y, X, C = out.shape
        video = out.view(B, T, Y, X, C // 4, 2, 2).permute(0, 1, 2, 5, 3, 6, 4).reshape(B, T, 2 * Y, 2 * X, C // 4)
        if aud is None:
            return video, None
        shift, scale = _modulation(part.audio_out_layer.modulation, t_a).chunk(2, dim=-1)
        aud = F.layer_norm(self.do.scaled(aud, shift, scale), aud.shape[-1:])
        return video, self.linear(part.audio_out_layer.out_layer, aud)

    def linear(self, layer: Any, x: Tensor) -> Tensor:
        out: Tensor = self.do.linear(x, self.held[id(layer.weight)], self.held.get(id(layer.bias)))
        return out

    def affine(self, norm: Any, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.held[id(norm.weight)], self.held[id(norm.bias)])

    def time(self, side: str, inputs: Inputs) -> Tensor:
        """Time and pooled text of one side, float32."""
        time, pooled = (getattr(self.part, f"{side}_{name}") for name in ("time_embeddings", "pooled_text_embeddings"))
        out: Tensor = time(inputs.timestep) + pooled(inputs.pooled.float())
        return out

    def attend(
        self, layer: Any, x: Tensor, keys: Tensor, ropes: tuple[_Rope, _Rope] | None, mask: Tensor | None = None
    ) -> Tensor:
        q, k, v = (
            self.linear(w, source).unflatten(-1, (layer.num_heads, -1))
            for w, source in ((layer.to_query, x), (layer.to_key, keys), (layer.to_value, keys))
        )
        q = self.do.norm_turn(q, layer.query_norm.weight, ropes and ropes[0])
        k = self.do.norm_turn(k, layer.key_norm.weight, ropes and ropes[1])
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.linear(layer.out_layer, out.transpose(1, 2).flatten(2))

    def forward(self, feed: Any, x: Tensor) -> Tensor:
        return self.linear(feed.net[2], F.gelu(self.linear(feed.net[0].proj, x)))

    def tower(self, side: str, text: Tensor, mask: Tensor, t: Tensor) -> Tensor:
        embed = getattr(self.part, f"{side}_text_embeddings")
        x = self.affine(embed.norm, self.linear(embed.in_layer, text))
        rope = _rope_1d(getattr(self.part, f"{side}_text_rope_embeddings"), x.shape[1])
        for block in getattr(self.part, f"{side}_text_transformer_blocks"):
            shift, scale, gate, shift_f, scale_f, gate_f = _modulation(block.text_modulation, t).chunk(6, dim=-1)
            y = self.do.scaled(x, shift, scale)
            x = self.do.gated(x, self.attend(block.attn, y, y, (rope, rope), mask), gate)
            x = self.do.gated(x, self.forward(block.feed_forward, self.do.scaled(x, shift_f, scale_f)), gate_f)
        return x

    def fused(
        self,
        block: Any,
        vis: Tensor,
        aud: Tensor | None,
        texts: tuple[Tensor, Tensor | None],
        times: tuple[Tensor, Tensor],
        ropes: tuple[_Rope, _Rope | None],
        mask: Tensor,
    ) -> tuple[Tensor, Tensor | None]:
        """One block; cross-modal keys are taken before the text residuals, and the cross-modal gates are crossed."""
        rope_v, rope_a = ropes
        scaled, gated = self.do.scaled, self.do.gated
        vis, pre_v, text_out_v, gate_v, feed_v = self.own(block.video_dec_block, vis, texts[0], times[0], rope_v, mask)
        vis = gated(vis, text_out_v, gate_v)
        if aud is not None:
            assert texts[1] is not None and rope_a is not None
            aud, pre_a, text_out_a, gate_a, feed_a = self.own(
                block.audio_dec_block, aud, texts[1], times[1], rope_a, mask
            )
            aud = gated(aud, text_out_a, gate_a)
            D, Da = vis.shape[-1], aud.shape[-1]
            shift_v, scale_v, to_audio = _modulation(block.va_modulation, times[0]).split([D, D, Da], dim=-1)
            shift_a, scale_a, to_video = _modulation(block.av_modulation, times[1]).split([Da, Da, D], dim=-1)
            q_v, q_a = scaled(vis, shift_v, scale_v), scaled(aud, shift_a, scale_a)
            vis = gated(vis, self.attend(block.va_cross_attention, q_v, pre_a, (rope_v, rope_a)), to_video)
            aud = gated(aud, self.attend(block.av_cross_attention, q_a, pre_v, (rope_a, rope_v)), to_audio)
            aud = self.feed(block.audio_dec_block, aud, feed_a)
        return self.feed(block.video_dec_block, vis, feed_v), aud

    def own(
        self, block: Any, x: Tensor, text: Tensor, t: Tensor, rope: _Rope, mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Self-attention, then text attention held back: stream, its scaled form, text output, its gate, the rest."""
        own, words, feed = _modulation(block.visual_modulation, t).chunk(3, dim=-1)
        shift, scale, gate = own.chunk(3, dim=-1)
        y = self.do.scaled(x, shift, scale)
        x = self.do.gated(x, self.attend(block.self_attention, y, y, (rope, rope)), gate)
        shift, scale, gate = words.chunk(3, dim=-1)
        pre = self.do.scaled(x, shift, scale)
        return x, pre, self.attend(block.cross_attention, pre, text, None, mask), gate, feed

    def feed(self, block: Any, x: Tensor, feed: Tensor) -> Tensor:
        shift, scale, gate = feed.chunk(3, dim=-1)
        return self.do.gated(x, self.forward(block.feed_forward, self.do.scaled(x, shift, scale)), gate)


def _patches(x: Tensor) -> Tensor:
    B, T, Y, X, C = x.shape
    return x.view(B, T, Y // 2, 2, X // 2, 2, C).permute(0, 1, 2, 4, 3, 5, 6).flatten(4)


def _modulation(layer: Any, t: Tensor) -> Tensor:
    """Shifts, scales and gates (B, 1, n), float32."""
    out: Tensor = layer(t)[:, None]
    return out


def _rope_1d(table: Any, length: int) -> _Rope:
    angles = table.angles[:length]
    return angles.cos(), angles.sin()


def _rope_3d(part: Any, frames: Tensor, rows: int, columns: int) -> _Rope:
    table, (ft, fy, fx) = part.visual_rope_embeddings, part.scale_factor
    t, y, x = table.angles_0[frames] / ft, table.angles_1[:rows] / fy, table.angles_2[:columns] / fx
    size = (len(frames), rows, columns, -1)
    angles = torch.cat(
        [t[:, None, None].expand(size), y[None, :, None].expand(size), x[None, None].expand(size)], dim=-1
    ).flatten(0, 2)
    return angles.cos(), angles.sin()
