"""Joining attention over parts of the keys: with partial outputs o_j and log-sum-exps l_j,

    out = sum_j exp(l_j - m) o_j / sum_j exp(l_j - m),   lse = m + log(sum_j exp(l_j - m)),   m = max_j l_j.

Shifting by the maximum matters: the shorter recurrence `out - sigmoid(l2 - l1) (out - o2)` loses everything when the
first part has no visible key. Such a part has the log-sum-exp `NO_KEY`, and here weighs exactly 0.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class Merger:
    """Adds up parts as they come, in the dtype of the log-sum-exp (float32; float64 for float64)."""

    def __init__(self, out_BSHK: Tensor, lse_BSH: Tensor) -> None:
        self._max_BSH1 = lse_BSH.unsqueeze(-1)
        self._sum_BSH1 = torch.ones_like(self._max_BSH1)
        self._out_BSHK = out_BSHK.to(lse_BSH.dtype)

    def add(self, out_BSHK: Tensor, lse_BSH: Tensor) -> None:
        lse_BSH1 = lse_BSH.unsqueeze(-1)
        max_BSH1 = torch.maximum(self._max_BSH1, lse_BSH1)
        old_BSH1, new_BSH1 = (self._max_BSH1 - max_BSH1).exp(), (lse_BSH1 - max_BSH1).exp()
        self._out_BSHK = self._out_BSHK * old_BSH1 + out_BSHK.to(lse_BSH.dtype) * new_BSH1
        self._sum_BSH1 = self._sum_BSH1 * old_BSH1 + new_BSH1
        self._max_BSH1 = max_BSH1

    def result(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Output (B, S, H, K) in `dtype`, log-sum-exp (B, S, H)."""
        out_BSHK = (self._out_BSHK / self._sum_BSH1).to(dtype)
        return out_BSHK, (self._max_BSH1 + self._sum_BSH1.log()).squeeze(-1)


def merge(parts: Iterable[tuple[Tensor, Tensor]], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Join (output, log-sum-exp) pairs in the order given: ranks with equal parts get equal bits."""
    first, *rest = parts
    merger = Merger(*first)
    for out_BSHK, lse_BSH in rest:
        merger.add(out_BSHK, lse_BSH)
    return merger.result(dtype)
