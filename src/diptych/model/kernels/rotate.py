"""Per-head RMSNorm and rotation in one pass (Triton), for queries and keys of one attention in one launch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from diptych.model.plain import Rope

EPS = tl.constexpr(1.1920929e-07)


@triton.jit(do_not_specialize=["S", "q_scale"])
def _norm_rotate(
    q_ptr,
    k_ptr,
    q_weight_ptr,
    k_weight_ptr,
    q_out_ptr,
    k_out_ptr,
    cos_ptr,
    sin_ptr,
    batch_stride,
    token_stride,
    S,
    q_scale,
    H: tl.constexpr,
    K: tl.constexpr,
    HEADS: tl.constexpr,
    ROTATE: tl.constexpr,
    ROWS: tl.constexpr,
):
    b = tl.program_id(1).to(tl.int64)
    heads = tl.arange(0, HEADS)[:, None]
    channels = tl.arange(0, K)[None, :]
    pairs = tl.arange(0, K // 2)
    within = heads * K + channels
    inside = (heads < H) & (channels < K)
    x_ptr, weight_ptr, out_ptr, scale = q_ptr, q_weight_ptr, q_out_ptr, q_scale
    if tl.program_id(2) == 1:
        x_ptr, weight_ptr, out_ptr, scale = k_ptr, k_weight_ptr, k_out_ptr, 1.0
    weight = tl.load(weight_ptr + channels).to(tl.float32) * scale
    first = tl.program_id(0) * ROWS
    for row in range(first, min(first + ROWS, S)):
        token = b * 0 + row  # 64 bits wide
        x = tl.load(x_ptr + b * batch_stride + token * token_stride + within, mask=inside, other=0.0)
        dtype: tl.constexpr = x.dtype
        x = x.to(tl.float32)
        x = x * tl.rsqrt(tl.sum(x * x, axis=1) / K + EPS)[:, None] * weight
        if ROTATE:
            cos = tl.load(cos_ptr + row * (K // 2) + pairs)[None, :]
            sin = tl.load(sin_ptr + row * (K // 2) + pairs)[None, :]
            even, odd = tl.split(tl.reshape(x, (HEADS, K // 2, 2)))
            x = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (HEADS, K))
        tl.store(out_ptr + (b * S + token) * (H * K) + within, x.to(dtype), mask=inside)


def norm_rotate(
    x_BSHK: Tensor, weight_K: Tensor, rope: Rope | None, *, scale: float = 1.0, own: bool = False
) -> Tensor:
    """`plain.norm_rotate` in one pass. A token's heads must lie side by side; the result is contiguous.

    own: written over `x_BSHK` where that is contiguous: a program has read all of a token before it writes it.
    """
    out = _result(x_BSHK, own)
    _launch(x_BSHK, x_BSHK, weight_K, weight_K, out, out, rope, scale, 1)
    return out


def norm_rotate_pair(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    q_weight_K: Tensor,
    k_weight_K: Tensor,
    rope: Rope | None,
    *,
    q_scale: float = 1.0,
    own: bool = False,
) -> tuple[Tensor, Tensor]:
    """`norm_rotate` of queries, times `q_scale`, and keys of the same tokens, in one launch."""
    q_out, k_out = _result(q_BSHK, own), _result(k_BSHK, own)
    _launch(q_BSHK, k_BSHK, q_weight_K, k_weight_K, q_out, k_out, rope, q_scale, 2)
    return q_out, k_out


def _result(x: Tensor, own: bool) -> Tensor:
    return x if own and x.is_contiguous() else torch.empty_like(x, memory_format=torch.contiguous_format)


def _launch(
    q: Tensor,
    k: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    q_out: Tensor,
    k_out: Tensor,
    rope: Rope | None,
    q_scale: float,
    tensors: int,
) -> None:
    B, S, H, K = q.shape
    assert rope is None or (rope.cos_SP.is_contiguous() and rope.sin_SP.is_contiguous() and len(rope.cos_SP) == S)
    tune = tuning(S, H * K)
    _norm_rotate[(triton.cdiv(S, tune["ROWS"]), B, tensors)](
        q,
        k,
        q_weight,
        k_weight,
        q_out,
        k_out,
        None if rope is None else rope.cos_SP,
        None if rope is None else rope.sin_SP,
        q.stride(0),
        q.stride(1),
        S,
        float(q_scale),
        H=H,
        K=K,
        HEADS=triton.next_power_of_2(H),
        ROTATE=rope is not None,
        **tune,
    )


def tuning(S: int, width: int) -> dict[str, Any]:
    """Rows a program, and warps: 32 values a thread, the fastest on an H200 for 28 heads of 64 and 32 of 128."""
    wide = triton.next_power_of_2(width)
    if S < 8192:
        return {"ROWS": 1, "num_warps": max(1, min(8, wide // 512))}
    return {"ROWS": 2 if wide < 4096 else 1, "num_warps": max(1, min(8, wide // 1024))}
