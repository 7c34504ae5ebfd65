"""Softmax attention in float64, written out; and how far a kernel may be from it."""

from __future__ import annotations

import torch
from torch import Tensor


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Output (B, S, H, K) and natural log-sum-exp (B, S, H); a query without a visible key gets zeros and -inf."""
    q, k, v = q.double(), k.double(), v.double()
    reads = q.shape[2] // k.shape[2] if k.shape[2] else 1
    k, v = k.repeat_interleave(reads, 2), v.repeat_interleave(reads, 2)
    scores = torch.einsum("bqhk,bshk->bqhs", q, k) / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask[:, None, None, :], float("-inf"))
    if k.shape[1] == 0:
        return torch.zeros_like(q), torch.full(q.shape[:3], float("-inf"), dtype=torch.float64)
    lse = scores.logsumexp(-1)
    weights = (scores - lse.unsqueeze(-1)).exp().nan_to_num(0.0)
    return torch.einsum("bqhs,bshk->bqhk", weights, v), lse


def tolerance(dtype: torch.dtype, v: Tensor) -> float:
    """What a local kernel's output may be off by with the small heads of these tests.

    A half-precision kernel rounds weights, sums and the result.
    """
    if dtype == torch.float64:
        return 1e-13
    if dtype == torch.float32:
        return 1e-6
    largest = float(v.abs().max()) if v.numel() else 0.0
    return 4 * torch.finfo(dtype).eps / 2 * largest


def assert_close(
    out: Tensor,
    lse: Tensor | None,
    expected: tuple[Tensor, Tensor],
    v: Tensor,
    dtype: torch.dtype,
    limits: tuple[float, float] | None = None,
) -> None:
    """Hold an output and a log-sum-exp against the reference. limits: of both, instead of the usual tolerance."""
    out_limit, lse_limit = limits or (tolerance(dtype, v), LSE_TOLERANCE.get(dtype, 2e-4))
    expected_out, expected_lse = expected
    assert out.dtype == dtype
    assert out.shape == expected_out.shape
    assert torch.isfinite(out).all()
    if out.numel():
        assert float((out.double() - expected_out).abs().max()) <= out_limit
    if lse is None:
        return
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.isfinite(lse).all()
    seen = torch.isfinite(expected_lse)
    assert (lse[~seen] < -1e29).all()
    if seen.any():
        assert float((lse.double() - expected_lse)[seen].abs().max()) <= lse_limit


LSE_TOLERANCE = {torch.float64: 1e-13, torch.float32: 2e-6}
