"""Joining attention over parts of the keys: with partial outputs o_j and log-sum-exps l_j,

    out = sum_j exp(l_j - m) o_j / sum_j exp(l_j - m),   lse = m + log(sum_j exp(l_j - m)),   m = max_j l_j.

Shifting by the maximum matters: the shorter recurrence `out - sigmoid(l2 - l1) (out - o2)` loses everything when the
first part has no visible key. Such a part has the log-sum-exp `NO_KEY`, and here weighs exactly 0.

On a GPU from Ampere on, one Triton kernel merges a part in one pass (`merge_kernel.py`); elsewhere, for float64 and
where a gradient is wanted, plain torch does. Both calculate in float32, but the kernel multiplies and adds in one
rounding, and its exponentials and logarithms are the GPU's fast ones: they may differ in the last bit. Which of the
two runs is decided by device, dtype and gradient alone, so that ranks with equal parts have equal bits.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from diptych.attention.cores import from_ampere


class Sums(NamedTuple):
    """What the parts so far add up to: sum_j exp(l_j - max) o_j, max_j l_j, and sum_j exp(l_j - max).

    In the dtype of the log-sum-exp (float32; float64 for float64). A single part is kept as it came: in its own dtype,
    with the weight 1, which is None.
    """

    out_BSHK: Tensor
    max_BSH: Tensor
    weight_BSH: Tensor | None = None


class Merger:
    """Adds up `parts` (output, log-sum-exp) pairs as they come, to a result in `dtype`.

    Told the number beforehand, it makes no pass over the first part, and none to divide after the last.
    """

    def __init__(self, parts: int, dtype: torch.dtype) -> None:
        assert parts > 0
        self._parts, self._dtype = parts, dtype
        self._sums: Sums | None = None

    def add(self, out_BSHK: Tensor, lse_BSH: Tensor) -> None:
        assert self._parts > 0, "more parts than were announced"
        self._parts -= 1
        if self._sums is None:
            self._sums = Sums(out_BSHK, lse_BSH)
            return
        dtype = None if self._parts else self._dtype
        if fusible(self._sums, out_BSHK, lse_BSH):
            from diptych.attention.merge_kernel import added

            self._sums = Sums(*added(*self._sums, out_BSHK, lse_BSH, dtype))
        else:
            self._sums = _added(self._sums, out_BSHK, lse_BSH, dtype)

    def result(self) -> tuple[Tensor, Tensor]:
        """Output (B, S, H, K), log-sum-exp (B, S, H)."""
        assert self._parts == 0 and self._sums is not None, f"{self._parts} parts are missing"
        return self._sums.out_BSHK.to(self._dtype), self._sums.max_BSH


def merge(parts: Iterable[tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Join (output, log-sum-exp) pairs in the order given: ranks with equal parts get equal bits."""
    known = list(parts)
    merger = Merger(len(known), dtype)
    for out_BSHK, lse_BSH in known:
        merger.add(out_BSHK, lse_BSH)
    return merger.result()


def fusible(sums: Sums, out_BSHK: Tensor, lse_BSH: Tensor) -> bool:
    """Whether the Triton kernel can add this part."""
    differentiable = (x.requires_grad for x in (sums.out_BSHK, sums.max_BSH, out_BSHK, lse_BSH))
    return (
        out_BSHK.is_cuda
        and out_BSHK.dtype in (torch.bfloat16, torch.float16, torch.float32)
        and out_BSHK.numel() > 0
        and not (torch.is_grad_enabled() and any(differentiable))
        and _has_triton
        and from_ampere(out_BSHK.device)
    )


def _added(sums: Sums, out_BSHK: Tensor, lse_BSH: Tensor, dtype: torch.dtype | None) -> Sums:
    """One more part; with `dtype` it is the last: the result, and its log-sum-exp as the maximum of one part."""
    weight_BSH = torch.ones_like(sums.max_BSH) if sums.weight_BSH is None else sums.weight_BSH
    max_BSH = torch.maximum(sums.max_BSH, lse_BSH)
    old_BSH, new_BSH = (sums.max_BSH - max_BSH).exp(), (lse_BSH - max_BSH).exp()
    total_BSHK = sums.out_BSHK.to(lse_BSH.dtype) * old_BSH.unsqueeze(-1)
    total_BSHK = total_BSHK + out_BSHK.to(lse_BSH.dtype) * new_BSH.unsqueeze(-1)
    weight_BSH = weight_BSH * old_BSH + new_BSH
    if dtype is None:
        return Sums(total_BSHK, max_BSH, weight_BSH)
    return Sums((total_BSHK / weight_BSH.unsqueeze(-1)).to(dtype), max_BSH + weight_BSH.log())


_has_triton = importlib.util.find_spec("triton") is not None
