"""The element-wise work of the transformer, one function a pass: a fused kernel where one can, else plain torch.

`plain.py` holds the arithmetic; `kernels/` holds the same in Triton, for half precision on an NVIDIA GPU. Triton is
imported where it runs, not where the model is defined.

own: nobody else reads the first tensor (queries and keys: either tensor), so a fused kernel may write over it.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from diptych.model import plain
from diptych.model.plain import LAYER_NORM_EPS, RMS_NORM_EPS, Rope, Rows, common_scale

__all__ = [
    "LAYER_NORM_EPS",
    "RMS_NORM_EPS",
    "Rope",
    "Rows",
    "common_scale",
    "gated",
    "gated_scale_shift",
    "gated_scale_shift_rows",
    "gelu",
    "gelu_rows",
    "norm_rotate",
    "norm_rotate_pair",
    "plain_only",
    "scale_shift",
    "scale_shift_rows",
    "to_rows",
]

_plain_only = False


@contextmanager
def plain_only() -> Iterator[None]:
    """No fused kernels inside: to measure what they bring, and what they change."""
    global _plain_only
    before, _plain_only = _plain_only, True
    try:
        yield
    finally:
        _plain_only = before


def scale_shift(x_BSD: Tensor, shift_BD: Tensor, scale_BD: Tensor) -> Tensor:
    """LayerNorm without weights, then `* (1 + scale) + shift`."""
    if fusible(x_BSD) and x_BSD.is_contiguous():
        from diptych.model.kernels import adaln

        return adaln.scale_shift(x_BSD, shift_BD, scale_BD)
    return plain.scale_shift(x_BSD, shift_BD, scale_BD)


def scale_shift_rows(x_BSD: Tensor, shift_BD: Tensor, scale_BD: Tensor) -> Rows:
    """`scale_shift` for a layer that takes fp8, quantised row by row."""
    if fusible(x_BSD) and x_BSD.is_contiguous():
        from diptych.model.kernels import adaln

        return adaln.scale_shift_rows(x_BSD, shift_BD, scale_BD)
    return plain.to_rows(plain.modulated(x_BSD, shift_BD, scale_BD))


def gated(x_BSD: Tensor, y_BSD: Tensor, gate_BD: Tensor, *, own: bool = False) -> Tensor:
    """Residual: `x + gate * y`."""
    if fusible(x_BSD) and x_BSD.is_contiguous() and y_BSD.is_contiguous():
        from diptych.model.kernels import adaln

        return adaln.gated(x_BSD, y_BSD, gate_BD, own=own)
    return plain.gated(x_BSD, y_BSD, gate_BD)


def gated_scale_shift(
    x_BSD: Tensor, y_BSD: Tensor, gate_BD: Tensor, shift_BD: Tensor, scale_BD: Tensor, *, own: bool = False
) -> tuple[Tensor, Tensor]:
    """`gated`, then `scale_shift` of its rounded result; returns both."""
    if fusible(x_BSD) and x_BSD.is_contiguous() and y_BSD.is_contiguous():
        from diptych.model.kernels import adaln

        return adaln.gated_scale_shift(x_BSD, y_BSD, gate_BD, shift_BD, scale_BD, own=own)
    return plain.gated_scale_shift(x_BSD, y_BSD, gate_BD, shift_BD, scale_BD)


def gated_scale_shift_rows(
    x_BSD: Tensor, y_BSD: Tensor, gate_BD: Tensor, shift_BD: Tensor, scale_BD: Tensor, *, own: bool = False
) -> tuple[Tensor, Rows]:
    """`gated_scale_shift` whose second result is for a layer that takes fp8."""
    if fusible(x_BSD) and x_BSD.is_contiguous() and y_BSD.is_contiguous():
        from diptych.model.kernels import adaln

        return adaln.gated_scale_shift_rows(x_BSD, y_BSD, gate_BD, shift_BD, scale_BD, own=own)
    x_BSD = plain.gated(x_BSD, y_BSD, gate_BD)
    return x_BSD, plain.to_rows(plain.modulated(x_BSD, shift_BD, scale_BD))


def to_rows(x: Tensor) -> Rows:
    """Quantise to fp8, one scale a row."""
    if fusible(x) and x.is_contiguous():
        from diptych.model.kernels import quantise

        return quantise.to_rows(x)
    return plain.to_rows(x)


def gelu(x: Tensor) -> Tensor:
    """GELU (erf). The fused kernel writes over `x`: give it a tensor that nobody else reads."""
    if fusible(x) and x.is_contiguous():
        from diptych.model.kernels import quantise

        return quantise.gelu_(x)
    return F.gelu(x)


def gelu_rows(x: Tensor) -> Rows:
    """GELU (erf), quantised row by row."""
    if fusible(x) and x.is_contiguous():
        from diptych.model.kernels import quantise

        return quantise.to_rows(x, gelu=True)
    return plain.to_rows(F.gelu(x.float()))


def norm_rotate(
    x_BSHK: Tensor, weight_K: Tensor, rope: Rope | None, *, scale: float = 1.0, own: bool = False
) -> Tensor:
    """Per-head RMSNorm, times `scale`, then rotation of adjacent channel pairs (none when `rope` is None)."""
    if fusible(x_BSHK) and _heads_adjacent(x_BSHK):
        from diptych.model.kernels import rotate

        return rotate.norm_rotate(x_BSHK, weight_K, rope, scale=scale, own=own)
    return plain.norm_rotate(x_BSHK, weight_K, rope, scale)


def norm_rotate_pair(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    q_weight_K: Tensor,
    k_weight_K: Tensor,
    rope: Rope | None,
    *,
    q_scale: float = 1.0,
    own: bool = False,
) -> tuple[Tensor, Tensor]:
    """`norm_rotate` of the queries, times `q_scale`, and keys of one token sequence."""
    alike = q_BSHK.shape == k_BSHK.shape and q_BSHK.stride() == k_BSHK.stride()
    if alike and fusible(q_BSHK) and _heads_adjacent(q_BSHK):
        from diptych.model.kernels import rotate

        return rotate.norm_rotate_pair(q_BSHK, k_BSHK, q_weight_K, k_weight_K, rope, q_scale=q_scale, own=own)
    return norm_rotate(q_BSHK, q_weight_K, rope, scale=q_scale, own=own), norm_rotate(k_BSHK, k_weight_K, rope, own=own)


def fusible(x: Tensor) -> bool:
    """Whether the Triton kernels can take this tensor: half precision, on a GPU from Ampere on, no gradient wanted."""
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.numel() > 0
        and not _plain_only
        and not (torch.is_grad_enabled() and x.requires_grad)
        and _has_triton
        and runs_kernels(x.device)
    )


@cache
def runs_kernels(device: torch.device) -> bool:
    """Whether our kernels, and those of the video decoder, run on a device: a GPU from Ampere on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def _heads_adjacent(x_BSHK: Tensor) -> bool:
    K = x_BSHK.shape[-1]
    return x_BSHK.stride(-1) == 1 and x_BSHK.stride(-2) == K and K & (K - 1) == 0


_has_triton = importlib.util.find_spec("triton") is not None
