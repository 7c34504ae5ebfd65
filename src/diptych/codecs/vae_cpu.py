"""The video VAE's convolutions on a CPU, always by oneDNN.

torch leaves inputs of at most 20,480 values of C x T x Y, however wide, to a kernel of its own that copies every
neighbourhood into memory; those are all convolutions of a small picture.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class OneDnnConv3d(nn.Conv3d):
    """`nn.Conv3d` without gradients; the result differs from torch's own kernel in rounding only."""

    def forward(self, x_BCTYX: Tensor) -> Tensor:
        assert not isinstance(self.padding, str)
        out: Tensor = torch.mkldnn_convolution(
            x_BCTYX, self.weight, self.bias, self.padding, self.stride, self.dilation, self.groups
        )
        return out


def speed_up(vae: Any) -> Any:
    """Let the convolutions of `vae` run by oneDNN, if it is in float32 on a CPU that has it; returns the same `vae`."""
    place, dtype = vae.device, vae.dtype
    if place.type == "cpu" and dtype is torch.float32 and torch.backends.mkldnn.is_available():
        for module in vae.modules():
            if type(module) is nn.Conv3d and module.padding_mode == "zeros":
                module.__class__ = OneDnnConv3d
    return vae
