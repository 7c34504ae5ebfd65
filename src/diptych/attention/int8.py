"""Attention whose scores are products of int8: an approximation, taken only by name. Values and weights stay bf16.

Products of queries and keys do not see a rotation of both, so both are turned by a Hadamard matrix: what a few large
channels decide is spread over all, and is rounded in many places instead of few (QuaRot, arXiv 2404.00456). Each 64
tokens of a head then get one scale (SageAttention, arXiv 2410.02367). Keys keep their mean, which SageAttention takes
off: here they are normalised, a rotation by position turns most of it away, and the bound of their scores holds for
them as they are.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

TOKENS = 64
"""Of one scale: the queries of a warpgroup, the keys of a tile."""
LARGEST = 127
LEAST = 1e-20
"""Of what is rounded: zeros have a scale too."""

_SIGNS: dict[tuple[int, torch.device], Tensor] = {}


class Rounded(NamedTuple):
    """x, turned, = values * scale of its block: int8 (B, S, H, K), float32 (B, H, blocks)."""

    values: Tensor
    scale: Tensor


def signs(K: int, device: torch.device) -> Tensor:
    """Orthogonal times sqrt(K): a Hadamard matrix whose rows have signs of their own; (K, K), K a power of two.

    Those of a bent function (neighbouring bits multiplied in pairs): what all channels share is spread evenly as well.
    """
    found = _SIGNS.get((K, device))
    if found is None:
        with torch.inference_mode(False):
            found = _signs(K, device)
        if type(found) is Tensor:  # one of a tracer's would be met again by those who compute
            _SIGNS[K, device] = found
    return found


def _signs(K: int, device: torch.device) -> Tensor:
    assert K & (K - 1) == 0, f"{K} is no power of two"
    row = torch.arange(K, device=device)[:, None]
    odd = _parity(row & row.T) ^ _parity(row & (row >> 1) & 0x5555)
    return (1 - 2 * odd).to(torch.bfloat16)


def _parity(bits: Tensor) -> Tensor:
    for shift in (8, 4, 2, 1):
        bits = bits ^ (bits >> shift)
    return bits & 1


def rounded(x_BSHK: Tensor) -> Rounded:
    """Turned, and to int8 with one scale for every 64 tokens of a head."""
    if x_BSHK.is_cuda:
        from diptych.attention.quantise import blocks

        return Rounded(*blocks(x_BSHK, signs(x_BSHK.shape[-1], x_BSHK.device)))
    return rounded_plainly(x_BSHK)


def rounded_plainly(x_BSHK: Tensor) -> Rounded:
    """The same in plain torch, in float32: the twin that the kernel is held to."""
    S, K = x_BSHK.shape[1], x_BSHK.shape[-1]
    turned = x_BSHK.float() @ signs(K, x_BSHK.device).float()
    blocks = pad(turned, (0, 0, 0, 0, 0, -S % TOKENS)).unflatten(1, (-1, TOKENS))
    scale = blocks.abs().amax((2, 4), keepdim=True).clamp_min(LEAST) / LARGEST
    values = (blocks / scale).round().clamp(-LARGEST, LARGEST).flatten(1, 2)[:, :S].to(torch.int8)
    return Rounded(values, scale[:, :, 0, :, 0].transpose(1, 2) / math.sqrt(K))


def bounded_int8(
    q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, key_mask_BS: Tensor | None, lse: bool, scale: float
) -> tuple[Tensor, Tensor | None]:
    """The core: scores are exponents of two, as for `bounded`."""
    from diptych.attention import bounded_kernel

    return bounded_kernel.attention_int8(rounded(q_BSHK), rounded(k_BSHK), v_BSHK, lse)
