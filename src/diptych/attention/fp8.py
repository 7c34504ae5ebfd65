"""fp8 attention with smoothed keys, FlashAttention-3's kernel: an approximation, taken only by name.

Softmax does not see a constant added to all keys, so their mean over the tokens is taken off before they are rounded
(SageAttention, arXiv 2410.02367, section 4.2); queries, keys and values then get one scale a batch entry and head.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from diptych.attention.cores import fa3_call

FP8_MAX = 448.0


class Scaled(NamedTuple):
    """x = values * scale + centre: e4m3 (B, S, H, K), float32 (B, H), float32 (B, H, K)."""

    values: Tensor
    scale: Tensor
    centre: Tensor


def quantise(x_BSHK: Tensor, *, smooth: bool) -> Scaled:
    """To e4m3 with one scale a head; smooth: the mean over the tokens is taken off first."""
    fused = x_BSHK.is_cuda and x_BSHK.stride(-1) == 1 and x_BSHK.stride(-2) == x_BSHK.shape[-1]
    if fused:
        from diptych.attention.quantise import scaled, statistics

        least_BHK, most_BHK, sum_BHK = statistics(x_BSHK)
    else:
        wide = x_BSHK.float()
        least_BHK, most_BHK, sum_BHK = wide.amin(1), wide.amax(1), wide.sum(1)
    centre = sum_BHK / x_BSHK.shape[1] if smooth else torch.zeros_like(sum_BHK)
    reach_BHK = torch.maximum(most_BHK - centre, centre - least_BHK)
    scale_BH = reach_BHK.amax(-1).clamp_min(1e-12) / FP8_MAX
    if fused:
        return Scaled(scaled(x_BSHK, centre, scale_BH), scale_BH, centre)
    values = ((x_BSHK.float() - centre[:, None]) / scale_BH[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX)
    return Scaled(values.to(torch.float8_e4m3fn), scale_BH, centre)


def fa3_fp8(
    q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, key_mask_BS: Tensor | None, lse: bool
) -> tuple[Tensor, Tensor | None]:
    """The core: bf16 in, bf16 out; the log-sum-exp is that of the keys before smoothing."""
    q, k, v = quantise(q_BSHK, smooth=False), quantise(k_BSHK, smooth=True), quantise(v_BSHK, smooth=False)
    out_BSHK, lse_BSH = fa3_call(
        q.values, k.values, v.values, lse, q_descale=q.scale, k_descale=k.scale, v_descale=v.scale
    )
    if lse_BSH is not None:
        shift_BSH = torch.einsum("bshk,bhk->bsh", q_BSHK.float(), k.centre) * q_BSHK.shape[-1] ** -0.5
        lse_BSH = lse_BSH + shift_BSH
    return out_BSHK, lse_BSH
