"""GroupNorm and SiLU over channels-last frames (Triton): one pass for the statistics, one to apply them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(do_not_specialize=["rows"])
def _moments(
    x_ptr, mean_ptr, square_ptr, rows, C: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, LOOP: tl.constexpr
):
    """Per program and group: the mean and the sum of squared distances from it, of ROWS * LOOP rows at most."""
    SIZE: tl.constexpr = C // GROUPS
    program = tl.program_id(0)
    first = program.to(tl.int64) * (ROWS * LOOP)
    offsets = tl.arange(0, ROWS)[:, None] * C + tl.arange(0, C)[None, :]
    total = tl.zeros((GROUPS,), dtype=tl.float32)
    for step in range(LOOP):
        row = first + step * ROWS
        inside = (row + tl.arange(0, ROWS)[:, None]) < rows
        x = tl.load(x_ptr + row * C + offsets, mask=inside, other=0.0).to(tl.float32)
        total += tl.sum(tl.sum(tl.reshape(x, (ROWS, GROUPS, SIZE)), axis=2), axis=0)
    count = tl.minimum(rows - first, ROWS * LOOP).to(tl.float32) * SIZE
    mean = total / count
    square = tl.zeros((GROUPS,), dtype=tl.float32)
    for step in range(LOOP):
        row = first + step * ROWS
        inside = (row + tl.arange(0, ROWS)[:, None]) < rows
        x = tl.load(x_ptr + row * C + offsets, mask=inside, other=0.0).to(tl.float32)
        distance = tl.reshape(x, (ROWS, GROUPS, SIZE)) - mean[None, :, None]
        distance = tl.where(tl.reshape(tl.broadcast_to(inside, (ROWS, C)), (ROWS, GROUPS, SIZE)), distance, 0.0)
        square += tl.sum(tl.sum(distance * distance, axis=2), axis=0)
    groups = tl.arange(0, GROUPS)
    tl.store(mean_ptr + program * GROUPS + groups, mean)
    tl.store(square_ptr + program * GROUPS + groups, square)


@triton.jit
def _scale_silu(x_ptr, scale_ptr, shift_ptr, out_ptr, values, C: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < values
    channel = (at % C).to(tl.int32)
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    x = x * tl.load(scale_ptr + channel) + tl.load(shift_ptr + channel)
    if SILU:
        x = x * tl.sigmoid(x)
    tl.store(out_ptr + at, x.to(out_ptr.dtype.element_ty), mask=inside)


def group_norm(x_TYXC: Tensor, norm: torch.nn.GroupNorm, *, silu: bool) -> Tensor:
    """GroupNorm over all frames and pixels, optionally with SiLU; float32 inside, one rounding."""
    assert x_TYXC.is_contiguous()
    C, groups = x_TYXC.shape[-1], norm.num_groups
    rows = x_TYXC.numel() // C
    chunk = max(1, 4096 // C)
    loop = 16 if rows >= 65_536 else 1
    programs = triton.cdiv(rows, chunk * loop)
    mean_PG, square_PG = torch.empty((2, programs, groups), dtype=torch.float32, device=x_TYXC.device)
    _moments[(programs,)](x_TYXC, mean_PG, square_PG, rows, C=C, GROUPS=groups, ROWS=chunk, LOOP=loop, num_warps=4)
    counts_P1 = torch.full((programs, 1), float(chunk * loop), device=x_TYXC.device)
    counts_P1[-1] = rows - (programs - 1) * chunk * loop
    mean_G = (mean_PG * counts_P1).sum(0) / rows
    between_G = ((mean_PG - mean_G).square() * counts_P1).sum(0) * (C // groups)
    variance_G = (square_PG.sum(0) + between_G) / (rows * (C // groups))
    rstd_C = torch.rsqrt(variance_G + norm.eps).repeat_interleave(C // groups)
    scale_C = rstd_C * norm.weight.float()
    shift_C = norm.bias.float() - mean_G.repeat_interleave(C // groups) * scale_C
    out = torch.empty_like(x_TYXC)
    block = 4096
    _scale_silu[(triton.cdiv(x_TYXC.numel(), block),)](
        x_TYXC, scale_C, shift_C, out, x_TYXC.numel(), C=C, SILU=silu, BLOCK=block, num_warps=8
    )
    return out
