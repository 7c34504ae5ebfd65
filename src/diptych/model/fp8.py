"""Linear layers with fp8 weights: row-wise scales on both sides, products at twice the rate of bf16."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor, nn

from diptych.model.ops import Rows, to_rows


class Fp8Linear(nn.Module):
    """`nn.Linear` with an e4m3 weight, one float32 scale an output channel; its input is quantised row by row.

    weight (out, in) float8_e4m3fn; weight_scale (1, out) float32; bias (out,) in the working dtype, or None. Takes a
    tensor, or `Rows` that the kernel before it has already quantised; returns the working dtype. It is stored as the
    layer it stands for: `take_weight` quantises what a checkpoint holds.
    """

    def __init__(self, weight: Rows, bias: Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.values.shape
        self.dtype = dtype
        self.weight = nn.Parameter(weight.values, requires_grad=False)
        self.weight_scale: Tensor
        self.register_buffer("weight_scale", weight.scale.reshape(1, -1), persistent=False)
        self.bias = None if bias is None else nn.Parameter(bias.to(dtype), requires_grad=False)

    @classmethod
    @torch.no_grad()
    def quantised(cls, linear: nn.Linear) -> Self:
        """The fp8 form of a layer."""
        return cls(to_rows(linear.weight), linear.bias, linear.weight.dtype)

    @torch.no_grad()
    def take_weight(self, weight: Tensor) -> None:
        """Hold this weight (out, in), quantised; its dtype is the working dtype from now on."""
        rows = to_rows(weight)
        self.weight = nn.Parameter(rows.values, requires_grad=False)
        self.weight_scale = rows.scale.reshape(1, -1)
        self.dtype = weight.dtype

    def forward(self, x: Tensor | Rows) -> Tensor:
        values, scale = x if isinstance(x, Rows) else to_rows(x)
        flat, scale = values.flatten(0, -2), scale.flatten(0, -2)
        out = self._product(flat, scale)
        return out.view(*values.shape[:-1], self.out_features)

    def _product(self, values_MK: Tensor, scale_M1: Tensor) -> Tensor:
        if values_MK.is_cuda:
            return torch._scaled_mm(
                values_MK,
                self.weight.t(),
                scale_a=scale_M1,
                scale_b=self.weight_scale,
                bias=self.bias,
                out_dtype=self.dtype,
                use_fast_accum=True,
            )
        out = (values_MK.float() @ self.weight.float().t()) * scale_M1 * self.weight_scale
        return (out if self.bias is None else out + self.bias.float()).to(self.dtype)


def takes_rows(layer: nn.Module) -> bool:
    """Whether this layer quantises what it is given, so that whoever makes that may do it."""
    return isinstance(layer, Fp8Linear)
