"""The element-wise arithmetic of the transformer, in plain torch: float32 inside, the stream's dtype outside.

Each function is one pass that a fused kernel can take over; this file is what such a kernel is compared with, and
what runs where no kernel can.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

LAYER_NORM_EPS = 1e-5
RMS_NORM_EPS = 1.1920929e-07
"""float32 machine epsilon, for every dtype: torch leaves the eps of an unset RMSNorm to the backend."""


class Rope(NamedTuple):
    """Rotary table of one token sequence: cosines and sines, float32 (S, K/2), one column a pair of channels."""

    cos_SP: Tensor
    sin_SP: Tensor


class Rows(NamedTuple):
    """A tensor in fp8 (e4m3) with one float32 scale a row: x = values * scale. values (..., D), scale (..., 1)."""

    values: Tensor
    scale: Tensor


FP8_MAX = 448.0


def to_rows(x: Tensor) -> Rows:
    """Quantise every row so that its largest value is the largest of e4m3."""
    wide = x.float()
    scale = wide.abs().amax(dim=-1, keepdim=True).clamp_min(1e-12) / FP8_MAX
    return Rows((wide / scale).to(torch.float8_e4m3fn), scale)


def common_scale(x: Tensor) -> Tensor:
    """One scale for all of x as `Rows`, and for whatever is no larger: float32 ()."""
    return x.abs().amax().float().clamp_min(1e-12) / FP8_MAX


def scale_shift(x_BSD: Tensor, shift_BD: Tensor, scale_BD: Tensor) -> Tensor:
    """LayerNorm without weights, then `* (1 + scale) + shift`."""
    return modulated(x_BSD, shift_BD, scale_BD).to(x_BSD.dtype)


def modulated(x_BSD: Tensor, shift_BD: Tensor, scale_BD: Tensor) -> Tensor:
    """`scale_shift` before rounding, float32."""
    normed = F.layer_norm(x_BSD.float(), x_BSD.shape[-1:], eps=LAYER_NORM_EPS)
    return normed * (scale_BD.unsqueeze(1) + 1.0) + shift_BD.unsqueeze(1)


def gated(x_BSD: Tensor, y_BSD: Tensor, gate_BD: Tensor) -> Tensor:
    """Residual: `x + gate * y`."""
    return (x_BSD.float() + gate_BD.unsqueeze(1) * y_BSD.float()).to(x_BSD.dtype)


def gated_scale_shift(
    x_BSD: Tensor, y_BSD: Tensor, gate_BD: Tensor, shift_BD: Tensor, scale_BD: Tensor
) -> tuple[Tensor, Tensor]:
    """`gated`, then `scale_shift` of its rounded result; returns both."""
    x_BSD = gated(x_BSD, y_BSD, gate_BD)
    return x_BSD, scale_shift(x_BSD, shift_BD, scale_BD)


def norm_rotate(x_BSHK: Tensor, weight_K: Tensor, rope: Rope | None, scale: float = 1.0) -> Tensor:
    """Per-head RMSNorm, times `scale`, then rotation of adjacent channel pairs (none when `rope` is None)."""
    x = F.rms_norm(x_BSHK.float(), x_BSHK.shape[-1:], weight_K.float() * scale, eps=RMS_NORM_EPS)
    if rope is not None:
        cos, sin = rope.cos_SP[:, None, :], rope.sin_SP[:, None, :]
        even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
        x = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return x.to(x_BSHK.dtype)
