"""One more partial result of an attention in one pass (Triton): what `merge._added` does in plain torch."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit(
    do_not_specialize=[
        "rows",
        "max_batch_stride", "max_token_stride", "max_head_stride",
        "lse_batch_stride", "lse_token_stride", "lse_head_stride",
    ]
)  # fmt: skip
def _add(
    old_ptr, max_ptr, weight_ptr, part_ptr, lse_ptr, out_ptr, out_max_ptr, out_weight_ptr, rows,
    old_batch_stride, old_token_stride, old_head_stride, max_batch_stride, max_token_stride, max_head_stride,
    part_batch_stride, part_token_stride, part_head_stride, lse_batch_stride, lse_token_stride, lse_head_stride,
    H: tl.constexpr, K: tl.constexpr, LAST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A row is one head of one token; `rows` of them in a batch entry. Without `weight_ptr` the old is a first part."""
    b = tl.program_id(1).to(tl.int64)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = row < rows
    token, head = (row // H).to(tl.int64), row % H
    channels = tl.arange(0, BLOCK)[None, :]
    inside = here[:, None] & (channels < K)

    old_max_at = b * max_batch_stride + token * max_token_stride + head * max_head_stride
    lse_at = b * lse_batch_stride + token * lse_token_stride + head * lse_head_stride
    old_max = tl.load(max_ptr + old_max_at, mask=here, other=0.0)
    lse = tl.load(lse_ptr + lse_at, mask=here, other=0.0)
    largest = tl.maximum(old_max, lse)
    old_scale, scale = tl.exp(old_max - largest), tl.exp(lse - largest)
    row_at = b * rows + row
    if weight_ptr is None:
        weight = old_scale + scale
    else:
        weight = tl.load(weight_ptr + row_at, mask=here, other=1.0) * old_scale + scale
    if LAST:
        old_scale, scale = tl.div_rn(old_scale, weight), tl.div_rn(scale, weight)
        largest += tl.log(weight)
    else:
        tl.store(out_weight_ptr + row_at, weight, mask=here)
    tl.store(out_max_ptr + row_at, largest, mask=here)

    old_at = b * old_batch_stride + token * old_token_stride + head * old_head_stride
    part_at = b * part_batch_stride + token * part_token_stride + head * part_head_stride
    old = tl.load(old_ptr + old_at[:, None] + channels, mask=inside, other=0.0).to(tl.float32)
    part = tl.load(part_ptr + part_at[:, None] + channels, mask=inside, other=0.0).to(tl.float32)
    total = old * old_scale[:, None] + part * scale[:, None]
    tl.store(out_ptr + row_at[:, None] * K + channels, total.to(out_ptr.dtype.element_ty), mask=inside)


def added(
    old_BSHK: Tensor,
    max_BSH: Tensor,
    weight_BSH: Tensor | None,
    out_BSHK: Tensor,
    lse_BSH: Tensor,
    dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The fields of `merge.Sums` with one more part, in float32; a sum is written over the one it was made from.

    dtype: of the result, where this part is the last; None where it is not.
    """
    B, S, H, K = out_BSHK.shape
    old_BSHK, out_BSHK = (x if x.stride(-1) == 1 else x.contiguous() for x in (old_BSHK, out_BSHK))
    assert weight_BSH is None or old_BSHK.is_contiguous()
    if weight_BSH is not None and dtype is None:
        total_BSHK = old_BSHK
    else:
        total_BSHK = torch.empty((B, S, H, K), dtype=dtype or torch.float32, device=out_BSHK.device)
    # Not in place: several threads read a row's maximum and weight, and one may be late.
    new_max_BSH = torch.empty((B, S, H), dtype=torch.float32, device=out_BSHK.device)
    new_weight_BSH = torch.empty_like(new_max_BSH) if dtype is None else None
    block = triton.next_power_of_2(K)
    tune = tuning(block)
    assert tune["ROWS"] * block >= 8 * 32 * tune["num_warps"], "a number read twice could be read after it was written"
    _add[(triton.cdiv(S * H, tune["ROWS"]), B)](
        old_BSHK, max_BSH, weight_BSH, out_BSHK, lse_BSH, total_BSHK, new_max_BSH, new_weight_BSH, S * H,
        *old_BSHK.stride()[:3], *max_BSH.stride(), *out_BSHK.stride()[:3], *lse_BSH.stride(),
        H=H, K=K, LAST=dtype is not None, BLOCK=block, **tune,
    )  # fmt: skip
    return total_BSHK, new_max_BSH, new_weight_BSH


def tuning(block: int) -> dict[str, Any]:
    """Rows a program, and warps: 32 values a thread, as `model.kernels.rotate` has them.

    On an H200 no other stood out: this one took 0.52 and 0.87 ms within one run, the others between 0.64 and 1.76.
    """
    return {"ROWS": max(1, 4096 // block), "num_warps": 4}
