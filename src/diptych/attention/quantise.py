"""Statistics and rounding of one attention input to fp8, a pass each (Triton)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TOKENS = 48


@triton.jit(do_not_specialize=["S"])
def _statistics(
    x_ptr, least_ptr, most_ptr, sum_ptr, batch_stride, token_stride, S,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    chunk, b = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    least = tl.full((BLOCK,), float("inf"), dtype=tl.float32)
    most = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    base = x_ptr + b.to(tl.int64) * batch_stride + columns
    first = (chunk * TOKENS).to(tl.int64)
    for step in range(0, TOKENS, 2):
        one = tl.minimum(first + step, S - 1)  # a token seen twice changes neither extreme, and its sum is left out
        two = tl.minimum(first + step + 1, S - 1)
        x = tl.load(base + one * token_stride, mask=inside, other=0.0).to(tl.float32)
        y = tl.load(base + two * token_stride, mask=inside, other=0.0).to(tl.float32)
        least = tl.minimum(least, tl.minimum(x, y))
        most = tl.maximum(most, tl.maximum(x, y))
        total += tl.where(first + step < S, x, 0.0) + tl.where(first + step + 1 < S, y, 0.0)
    at = (chunk * tl.num_programs(1) + b) * WIDTH + columns
    tl.store(least_ptr + at, least, mask=inside)
    tl.store(most_ptr + at, most, mask=inside)
    tl.store(sum_ptr + at, total, mask=inside)


@triton.jit(do_not_specialize=["S"])
def _scaled(
    x_ptr, centre_ptr, scale_ptr, signs_ptr, out_ptr, batch_stride, token_stride, S,
    H: tl.constexpr, K: tl.constexpr, ROTATE: tl.constexpr, ROWS: tl.constexpr,
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
    values = x.to(tl.float32) - centre
    if ROTATE:
        signs = tl.load(signs_ptr + channels[:, None] * K + channels[None, :])
        values = tl.dot(values.to(signs.dtype), signs)
    values = values * (1.0 / scale)
    values = tl.minimum(tl.maximum(values, -448.0), 448.0)
    out = out_ptr + ((b * S + token)[:, None] * H + head) * K + channels[None, :]
    tl.store(out, values.to(tl.float8e4nv), mask=inside)


def statistics(x_BSHK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Minimum, maximum and sum over the tokens, float32 (B, H, K). A token's heads must lie side by side."""
    B, S, H, K = x_BSHK.shape
    chunks, block = triton.cdiv(S, TOKENS), triton.next_power_of_2(H * K)
    parts = torch.empty((3, chunks, B, H, K), dtype=torch.float32, device=x_BSHK.device)
    _statistics[(chunks, B)](
        x_BSHK, *parts, x_BSHK.stride(0), x_BSHK.stride(1), S,
        WIDTH=H * K, BLOCK=block, TOKENS=TOKENS, num_warps=max(1, min(8, block // 512)),
    )  # fmt: skip
    return parts[0].amin(0), parts[1].amax(0), parts[2].sum(0)


def scaled(x_BSHK: Tensor, centre_BHK: Tensor, scale_BH: Tensor, signs_KK: Tensor | None = None) -> Tensor:
    """(x - centre) / scale in e4m3, contiguous; with `signs_KK`, 1 and -1, first multiplied by them."""
    B, S, H, K = x_BSHK.shape
    out = torch.empty((B, S, H, K), dtype=torch.float8_e4m3fn, device=x_BSHK.device)
    rows, warps = (64, 4) if signs_KK is None else (128, 8)
    centre_BHK = centre_BHK.contiguous()
    _scaled[(triton.cdiv(S, rows), H, B)](
        x_BSHK, centre_BHK, scale_BH.contiguous(), centre_BHK if signs_KK is None else signs_KK, out,
        x_BSHK.stride(0), x_BSHK.stride(1), S,
        H=H, K=K, ROTATE=signs_KK is not None, ROWS=rows, num_warps=warps,
    )  # fmt: skip
    return out
