"""Statistics and rounding of one attention input to fp8, a pass each (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, LOOP = 32, 16


@triton.jit
def _statistics(
    x_ptr, least_ptr, most_ptr, sum_ptr, batch_stride, token_stride, S,
    H: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, LOOP: tl.constexpr,
):  # fmt: skip
    chunk, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channels = tl.arange(0, K)
    tokens = tl.arange(0, ROWS)
    least = tl.full((ROWS, K), float("inf"), dtype=tl.float32)
    most = tl.full((ROWS, K), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS, K), dtype=tl.float32)
    base = x_ptr + b.to(tl.int64) * batch_stride + head * K
    for step in range(LOOP):
        token = chunk * (ROWS * LOOP) + step * ROWS + tokens
        inside = (token < S)[:, None]
        x = tl.load(base + token.to(tl.int64)[:, None] * token_stride + channels[None, :], mask=inside, other=0.0)
        x = x.to(tl.float32)
        least = tl.minimum(least, tl.where(inside, x, float("inf")))
        most = tl.maximum(most, tl.where(inside, x, float("-inf")))
        total += x
    at = ((chunk * tl.num_programs(2) + b) * H + head) * K + channels
    tl.store(least_ptr + at, tl.min(least, axis=0))
    tl.store(most_ptr + at, tl.max(most, axis=0))
    tl.store(sum_ptr + at, tl.sum(total, axis=0))


@triton.jit
def _scaled(
    x_ptr, centre_ptr, scale_ptr, out_ptr, batch_stride, token_stride, S,
    H: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    chunk, head, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    channels = tl.arange(0, K)
    token = (chunk * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = (token < S)[:, None]
    centre = tl.load(centre_ptr + (b * H + head) * K + channels)[None, :]
    scale = tl.load(scale_ptr + b * H + head)
    x = tl.load(
        x_ptr + b.to(tl.int64) * batch_stride + token[:, None] * token_stride + head * K + channels[None, :],
        mask=inside,
        other=0.0,
    )
    values = (x.to(tl.float32) - centre) / scale
    values = tl.minimum(tl.maximum(values, -448.0), 448.0)
    out = out_ptr + ((b * S + token)[:, None] * H + head) * K + channels[None, :]
    tl.store(out, values.to(tl.float8e4nv), mask=inside)


def statistics(x_BSHK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Minimum, maximum and sum over the tokens, float32 (B, H, K). A token's heads must lie side by side."""
    B, S, H, K = x_BSHK.shape
    chunks = triton.cdiv(S, ROWS * LOOP)
    parts = torch.empty((3, chunks, B, H, K), dtype=torch.float32, device=x_BSHK.device)
    _statistics[(chunks, H, B)](
        x_BSHK, *parts, x_BSHK.stride(0), x_BSHK.stride(1), S, H=H, K=K, ROWS=ROWS, LOOP=LOOP, num_warps=4
    )
    return parts[0].amin(0), parts[1].amax(0), parts[2].sum(0)


def scaled(x_BSHK: Tensor, centre_BHK: Tensor, scale_BH: Tensor) -> Tensor:
    """(x - centre) / scale in e4m3, contiguous."""
    B, S, H, K = x_BSHK.shape
    out = torch.empty((B, S, H, K), dtype=torch.float8_e4m3fn, device=x_BSHK.device)
    rows = 64
    _scaled[(triton.cdiv(S, rows), H, B)](
        x_BSHK, centre_BHK.contiguous(), scale_BH.contiguous(), out, x_BSHK.stride(0), x_BSHK.stride(1), S,
        H=H, K=K, ROWS=rows, num_warps=4,
    )  # fmt: skip
    return out
