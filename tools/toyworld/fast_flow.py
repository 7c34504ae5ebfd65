"""The stock transformer's arithmetic on its own weights, arranged for training without a compiler.

The stock module works out norms, shifts and gates in float32 over many small passes, which a small model spends most of
its time on. Here the streams stay in the dtype asked for, each shift-and-scale and each gate is one pass, and weights
are cast where they are used. `tests/toyworld` holds the result, in float32, to the stock module's.
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


def velocity(model: nn.Module, inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """Velocity of the video (B, T, Y, X, C) and of the audio (B, A, C), in `dtype`."""
    part: Any = model
    text, mask = inputs.text.to(dtype), inputs.mask[:, None, None, :]
    t_v, t_a = (_time(part, side, inputs) for side in ("video", "audio"))
    text_v = _tower(part, "video", text, mask, t_v)
    vis = _linear(part.visual_embeddings.in_layer, _patches(inputs.video.to(dtype)))
    if inputs.token_types is not None:
        # Between the two rows, for looking up leaves a backward pass that adds token by token.
        plain, marked = part.visual_token_type_embeddings.weight.to(dtype)
        vis = vis + torch.lerp(plain, marked, inputs.token_types[:, :, None, None, None].to(dtype))
    shape = vis.shape[1:4]
    vis = vis.flatten(1, 3)
    rope_v = _rope_3d(part, inputs.frame_places, shape[1], shape[2])
    aud = text_a = rope_a = None
    if inputs.audio is not None:
        text_a = _tower(part, "audio", text, mask, t_a)
        aud = _affine(part.audio_embeddings.norm, _linear(part.audio_embeddings.in_layer, inputs.audio.to(dtype)))
        rope_a = _rope_1d(part.audio_rope_embeddings, aud.shape[1])
    for block in part.visual_transformer_blocks:
        vis, aud = _fused(block, vis, aud, (text_v, text_a), (t_v, t_a), (rope_v, rope_a), mask)
    shift, scale = _modulation(part.out_layer.modulation, t_v).chunk(2, dim=-1)
    out = _linear(part.out_layer.out_layer, _scaled(vis, shift, scale)).unflatten(1, shape)
    B, T, Y, X, C = out.shape
    video = out.view(B, T, Y, X, C // 4, 2, 2).permute(0, 1, 2, 5, 3, 6, 4).reshape(B, T, 2 * Y, 2 * X, C // 4)
    if aud is None:
        return video, None
    shift, scale = _modulation(part.audio_out_layer.modulation, t_a).chunk(2, dim=-1)
    aud = F.layer_norm(_scaled(aud, shift, scale), aud.shape[-1:])
    return video, _linear(part.audio_out_layer.out_layer, aud)


def _linear(layer: Any, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))


def _affine(norm: Any, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], norm.weight.to(x.dtype), norm.bias.to(x.dtype))


def _patches(x: Tensor) -> Tensor:
    B, T, Y, X, C = x.shape
    return x.view(B, T, Y // 2, 2, X // 2, 2, C).permute(0, 1, 2, 4, 3, 5, 6).flatten(4)


def _time(part: Any, side: str, inputs: Inputs) -> Tensor:
    """Time and pooled text of one side, float32."""
    time, pooled = getattr(part, f"{side}_time_embeddings"), getattr(part, f"{side}_pooled_text_embeddings")
    return time(inputs.timestep) + pooled(inputs.pooled.float())


def _modulation(layer: Any, t: Tensor) -> Tensor:
    """Shifts, scales and gates (B, 1, n), float32."""
    out: Tensor = layer(t)[:, None]
    return out


def _scaled(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return torch.addcmul(shift.to(x.dtype), F.layer_norm(x, x.shape[-1:]), (scale + 1).to(x.dtype))


def _gated(x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
    return torch.addcmul(x, y, gate.to(x.dtype))


def _rope_1d(table: Any, length: int) -> Tensor:
    angles = table.angles[:length]
    return torch.complex(angles.cos(), angles.sin())[:, None]


def _rope_3d(part: Any, frames: Tensor, rows: int, columns: int) -> Tensor:
    table, (ft, fy, fx) = part.visual_rope_embeddings, part.scale_factor
    t, y, x = table.angles_0[frames] / ft, table.angles_1[:rows] / fy, table.angles_2[:columns] / fx
    size = (len(frames), rows, columns, -1)
    angles = torch.cat(
        [t[:, None, None].expand(size), y[None, :, None].expand(size), x[None, None].expand(size)], dim=-1
    ).flatten(0, 2)
    return torch.complex(angles.cos(), angles.sin())[:, None]


def _attend(
    layer: Any, x: Tensor, keys: Tensor, rope: tuple[Tensor, Tensor] | None, mask: Tensor | None = None
) -> Tensor:
    heads = layer.num_heads
    q, k, v = (
        _linear(w, source).unflatten(-1, (heads, -1))
        for w, source in ((layer.to_query, x), (layer.to_key, keys), (layer.to_value, keys))
    )
    q, k = (_normed(n, t) for n, t in ((layer.query_norm, q), (layer.key_norm, k)))
    if rope is not None:
        q, k = (_turned(t, r) for t, r in zip((q, k), rope, strict=True))
    q, k, v = (t.to(x.dtype).transpose(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    return _linear(layer.out_layer, out.transpose(1, 2).flatten(2))


def _normed(norm: Any, x: Tensor) -> Tensor:
    """RMS norm over a head, float32, with the epsilon of float32."""
    return F.rms_norm(x.float(), x.shape[-1:], norm.weight)


def _turned(x: Tensor, rope: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * rope).flatten(-2)


def _forward(feed: Any, x: Tensor) -> Tensor:
    return _linear(feed.net[2], F.gelu(_linear(feed.net[0].proj, x)))


def _tower(part: Any, side: str, text: Tensor, mask: Tensor, t: Tensor) -> Tensor:
    embed = getattr(part, f"{side}_text_embeddings")
    x = _affine(embed.norm, _linear(embed.in_layer, text))
    rope = _rope_1d(getattr(part, f"{side}_text_rope_embeddings"), x.shape[1])
    for block in getattr(part, f"{side}_text_transformer_blocks"):
        shift, scale, gate, shift_f, scale_f, gate_f = _modulation(block.text_modulation, t).chunk(6, dim=-1)
        y = _scaled(x, shift, scale)
        x = _gated(x, _attend(block.attn, y, y, (rope, rope), mask), gate)
        x = _gated(x, _forward(block.feed_forward, _scaled(x, shift_f, scale_f)), gate_f)
    return x


def _fused(
    block: Any,
    vis: Tensor,
    aud: Tensor | None,
    texts: tuple[Tensor, Tensor | None],
    times: tuple[Tensor, Tensor],
    ropes: tuple[Tensor, Tensor | None],
    mask: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """One block; cross-modal keys are taken before the text residuals, and the cross-modal gates are crossed."""
    rope_v, rope_a = ropes
    vis, pre_v, text_out_v, gate_v, feed_v = _own(block.video_dec_block, vis, texts[0], times[0], rope_v, mask)
    vis = _gated(vis, text_out_v, gate_v)
    if aud is not None:
        assert texts[1] is not None and rope_a is not None
        aud, pre_a, text_out_a, gate_a, feed_a = _own(block.audio_dec_block, aud, texts[1], times[1], rope_a, mask)
        aud = _gated(aud, text_out_a, gate_a)
        D, Da = vis.shape[-1], aud.shape[-1]
        shift_v, scale_v, to_audio = _modulation(block.va_modulation, times[0]).split([D, D, Da], dim=-1)
        shift_a, scale_a, to_video = _modulation(block.av_modulation, times[1]).split([Da, Da, D], dim=-1)
        q_v, q_a = _scaled(vis, shift_v, scale_v), _scaled(aud, shift_a, scale_a)
        vis = _gated(vis, _attend(block.va_cross_attention, q_v, pre_a, (rope_v, rope_a)), to_video)
        aud = _gated(aud, _attend(block.av_cross_attention, q_a, pre_v, (rope_a, rope_v)), to_audio)
        aud = _feed(block.audio_dec_block, aud, feed_a)
    return _feed(block.video_dec_block, vis, feed_v), aud


def _own(
    block: Any, x: Tensor, text: Tensor, t: Tensor, rope: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Self-attention, then text attention held back: stream, its scaled form, text output, its gate, what is left."""
    own, words, feed = _modulation(block.visual_modulation, t).chunk(3, dim=-1)
    shift, scale, gate = own.chunk(3, dim=-1)
    y = _scaled(x, shift, scale)
    x = _gated(x, _attend(block.self_attention, y, y, (rope, rope)), gate)
    shift, scale, gate = words.chunk(3, dim=-1)
    pre = _scaled(x, shift, scale)
    return x, pre, _attend(block.cross_attention, pre, text, None, mask), gate, feed


def _feed(block: Any, x: Tensor, feed: Tensor) -> Tensor:
    shift, scale, gate = feed.chunk(3, dim=-1)
    return _gated(x, _forward(block.feed_forward, _scaled(x, shift, scale)), gate)
