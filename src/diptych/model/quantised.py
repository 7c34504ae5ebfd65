"""Linear layers that hold their weight in 8 or 4 bits and multiply with it in the working dtype.

Only weights are rounded, never what passes through: for a language model that reads one prompt a clip, where weights
are all there is to save.
"""

from __future__ import annotations

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 64
"""Weights that share one scale in NF4."""


class QuantisedLinear(nn.Module):
    """`nn.Linear` whose `weight` is held as `_pack` makes it, and made whole again for each product.

    weight_scale: float32; bias (out,) as it was, or None. It is stored as the layer it stands for: `take_weight`
    quantises what a checkpoint holds, and until then the weight has the shape of the stored one. All that it holds are
    plain tensors, so they can wait in host memory like any others.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features, self.dtype = linear.in_features, linear.out_features, linear.weight.dtype
        self.weight, self.bias = linear.weight, linear.bias
        self.weight_scale: Tensor
        self.register_buffer("weight_scale", torch.empty(0, device=linear.weight.device), persistent=False)

    @classmethod
    def of(cls, linear: nn.Linear) -> Self:
        """The form of a layer; of one on meta, to be loaded later."""
        layer = cls(linear)
        if not linear.weight.is_meta:
            layer.take_weight(linear.weight.detach())
        return layer

    @torch.no_grad()
    def take_weight(self, weight: Tensor) -> None:
        """Hold this weight (out, in), quantised; its dtype is the working dtype from now on."""
        packed, self.weight_scale = self._pack(weight)
        self.weight, self.dtype = nn.Parameter(packed, requires_grad=False), weight.dtype

    def whole(self) -> Tensor:
        """The rounded weight (out, in) in the working dtype."""
        raise NotImplementedError

    def _pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.whole(), self.bias)


class Int8Linear(QuantisedLinear):
    """weight (out, in) int8, a scale for each output channel (out, 1): its largest weight is 127."""

    def _pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        scale = weight.abs().amax(1, keepdim=True).float() / 127
        steps = weight / torch.where(scale == 0, 1.0, scale)  # one weight at a time is in float32, not all of them
        return steps.round_().to(torch.int8), scale

    def whole(self) -> Tensor:
        weight = torch.empty(self.weight.shape, dtype=self.dtype, device=self.weight.device)
        return torch.mul(self.weight, self.weight_scale, out=weight)  # in float32, rounded once


class Nf4Linear(QuantisedLinear):
    """weight (out in / 2, 1) uint8: two of the 16 values of NF4 a byte; a scale for each 64 weights.

    NF4: Dettmers et al., QLoRA (2023), appendix E; by bitsandbytes, on a CPU and on GPUs.
    """

    def _pack(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        packed, state = _bitsandbytes().quantize_4bit(weight.contiguous(), blocksize=BLOCK, quant_type="nf4")
        return packed, state.absmax

    def whole(self) -> Tensor:
        nf4, count = _bitsandbytes(), self.out_features * self.in_features
        # Told a width that is no multiple of the block, bitsandbytes 0.50 on a CPU takes other blocks than it made.
        shape = torch.Size((count,) if count % BLOCK else (count // BLOCK, BLOCK))
        state = nf4.QuantState(self.weight_scale, shape=shape, dtype=self.dtype, blocksize=BLOCK, quant_type="nf4")
        weight: Tensor = nf4.dequantize_4bit(self.weight, state)
        return weight.view(self.out_features, self.in_features)


def _bitsandbytes() -> Any:
    """Its functions."""
    from bitsandbytes import functional

    return functional


FORMS: dict[str, type[QuantisedLinear]] = {"8bit": Int8Linear, "nf4": Nf4Linear}


def quantise_linears(model: nn.Module, form: str) -> None:
    """Put every `nn.Linear` inside `model` into one of `FORMS`, in place. On meta: to be quantised while it is read."""
    for path, linear in [(path, part) for path, part in model.named_modules() if isinstance(part, nn.Linear)]:
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, FORMS[form].of(linear))
