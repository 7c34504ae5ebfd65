"""fp8 attention with smoothed keys, FlashAttention-3's kernel: an approximation, taken only by name.

Softmax does not see a constant added to all keys, so their mean over the tokens is taken off before they are rounded
(SageAttention, arXiv 2410.02367, section 4.2). Products of queries and keys do not see a rotation of both, so both are
turned by a Hadamard matrix: what a few large channels decide is spread over all, and is rounded in many places instead
of few (FlashAttention-3, arXiv 2407.08608, section 3.3). Queries, keys and values then get one scale a batch entry and
head.
"""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from diptych.attention.cores import fa3_call

FP8_MAX = 448.0


class Scaled(NamedTuple):
    """x = values * scale + centre: e4m3 (B, S, H, K), float32 (B, H), float32 (B, H, K).

    Rotated, x - centre is what `values * scale` was before it was turned.
    """

    values: Tensor
    scale: Tensor
    centre: Tensor


@cache
def signs(K: int, device: torch.device) -> Tensor:
    """Orthogonal times sqrt(K): a Hadamard matrix whose rows have signs of their own; (K, K), K a power of two.

    Those of a bent function (neighbouring bits multiplied in pairs): what all channels share is spread evenly as well.
    """
    assert K & (K - 1) == 0, f"{K} is no power of two"
    row = torch.arange(K, device=device)[:, None]
    odd = _parity(row & row.T) ^ _parity(row & (row >> 1) & 0x5555)
    return (1 - 2 * odd).to(torch.bfloat16)


def _parity(bits: Tensor) -> Tensor:
    for shift in (8, 4, 2, 1):
        bits = bits ^ (bits >> shift)
    return bits & 1


def quantise(x_BSHK: Tensor, *, smooth: bool, rotate: bool = False) -> Scaled:
    """To e4m3 with one scale a head; smooth: the mean over the tokens is taken off first; rotate: turned then."""
    K = x_BSHK.shape[-1]
    fused = x_BSHK.is_cuda and x_BSHK.stride(-1) == 1 and x_BSHK.stride(-2) == x_BSHK.shape[-1]
    if fused:
        from diptych.attention.quantise import scaled, statistics

        least_BHK, most_BHK, sum_BHK = statistics(x_BSHK)
    else:
        wide = x_BSHK.float()
        least_BHK, most_BHK, sum_BHK = wide.amin(1), wide.amax(1), wide.sum(1)
    centre = sum_BHK / x_BSHK.shape[1] if smooth else torch.zeros_like(sum_BHK)
    reach_BHK = torch.maximum(most_BHK - centre, centre - least_BHK)
    # No channel of a turned token is longer than the token. That is generous, and e4m3 has the range for it.
    largest_BH = reach_BHK.square().sum(-1).sqrt() if rotate else reach_BHK.amax(-1)
    scale_BH = largest_BH.clamp_min(1e-12) / FP8_MAX
    turn_KK = signs(K, x_BSHK.device) if rotate else None
    if fused:
        whole_BH = scale_BH if turn_KK is None else scale_BH * math.sqrt(K)
        return Scaled(scaled(x_BSHK, centre, whole_BH, turn_KK), scale_BH, centre)
    wide = x_BSHK.float() - centre[:, None]
    if turn_KK is not None:
        wide = wide @ turn_KK.float() / math.sqrt(K)
    values = (wide / scale_BH[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
    return Scaled(values.to(torch.float8_e4m3fn), scale_BH, centre)


def rounded(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor) -> tuple[Scaled, Scaled, Scaled]:
    """Queries and keys turned, keys without their mean, and values, as the core multiplies them."""
    q, k = quantise(q_BSHK, smooth=False, rotate=True), quantise(k_BSHK, smooth=True, rotate=True)
    return q, k, quantise(v_BSHK, smooth=False)


def fa3_fp8(
    q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, key_mask_BS: Tensor | None, lse: bool, scale: float
) -> tuple[Tensor, Tensor | None]:
    """The core: bf16 in, bf16 out; the log-sum-exp is that of the keys before smoothing."""
    q, k, v = rounded(q_BSHK, k_BSHK, v_BSHK)
    out_BSHK, lse_BSH = fa3_call(
        q.values, k.values, v.values, lse, scale, q_descale=q.scale, k_descale=k.scale, v_descale=v.scale
    )
    if lse_BSH is not None:
        shift_BSH = torch.einsum("bshk,bhk->bsh", q_BSHK.float(), k.centre) * scale
        lse_BSH = lse_BSH + shift_BSH
    return out_BSHK, lse_BSH
