"""Seeded random weights under which every path of a model matters and nothing saturates.

Gains were chosen by measurement on the tiny checkpoint: outputs of order 1, pictures with contrast, sound at a quarter
of full scale, and a rounding error that sampling does not amplify more than twofold.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

Draw = Callable[[str, Tensor], Tensor]
"""(name, standard normal noise of the tensor's shape) to the tensor."""


@torch.no_grad()
def fill(model: nn.Module, rule: Draw, seed: int) -> None:
    """Redraw every parameter, and the buffers that `rule` knows, from one CPU generator.

    `rule(name, noise)` turns standard normal noise of the tensor's shape into the tensor.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.copy_(rule(name, noise))
    for name, buffer in sorted(model.named_buffers()):
        if name.endswith(("data_mean", "data_std")):
            buffer.copy_(rule(name, torch.randn(buffer.shape, generator=generator)))


def _linear(noise: Tensor, gain: float = 1.0) -> Tensor:
    """Weights (out, in, *kernel) that keep the size of what passes, times `gain`."""
    return noise * (gain / math.sqrt(noise[0].numel()))


def _transformer(name: str, noise: Tensor) -> Tensor:
    if "modulation" in name:  # shift, scale and gate near ±0.5, half of it from the time
        return _linear(noise, 0.5) if name.endswith("weight") else 0.4 * noise
    if "norm" in name:
        return 1 + 0.2 * noise if name.endswith("weight") else 0.2 * noise
    if "token_type" in name:
        return 0.5 * noise
    if name.endswith("out_layer.out_layer.weight"):  # the heads: guidance of 5 then gives velocities near 1
        return _linear(noise, 0.3)
    return _linear(noise) if name.endswith("weight") else 0.1 * noise


def _plain(name: str, noise: Tensor) -> Tensor:
    if noise.ndim < 2:  # norms and biases
        return 1 + 0.1 * noise if name.endswith("weight") else 0.1 * noise
    return 0.5 * noise if "embed" in name and "patch" not in name else _linear(noise)


def _video_vae(name: str, noise: Tensor) -> Tensor:
    if name == "quant_conv.bias":  # mean, then log variance: a posterior narrower than the means spread
        half = len(noise) // 2
        return 0.1 * noise - torch.cat((torch.zeros(half), torch.full((half,), 3.0)))
    return _plain(name, noise)


def _audio_vae(name: str, noise: Tensor) -> Tensor:
    if name.endswith("data_mean"):
        return -5 + 0.5 * noise
    if name.endswith("data_std"):
        return 2 + 0.2 * noise
    return 0.1 * noise if noise.ndim == 0 else _linear(noise)


def _vocoder(name: str, noise: Tensor) -> Tensor:
    if noise.ndim < 2:
        return 0.1 * noise
    if name.startswith("conv_post"):  # no direct current: the snake activations are positive on average
        return _linear(noise - noise.mean(-1, keepdim=True), 0.1)
    return _linear(noise, 0.3 if "convs2" in name else 1.0)


RULES: dict[str, Draw] = {
    "transformer": _transformer,
    "vae": _video_vae,
    "text_encoder": _plain,
    "text_encoder_2": _plain,
    "audio_vae": _audio_vae,
    "vocoder": _vocoder,
}
"""How the weights of each component are drawn."""
