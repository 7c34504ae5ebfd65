"""What is benchmarked: random weights of a model and random inputs of a clip's size, made on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from diptych.model.config import TransformerConfig
from diptych.model.transformer import Transformer
from diptych.planner.geometry import MODELS as MODELS
from diptych.planner.geometry import TEXT_TOKENS as TEXT_TOKENS
from diptych.planner.geometry import Geometry as Geometry
from diptych.planner.geometry import config_named as config_named


def random_transformer(
    config: TransformerConfig, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> Transformer:
    """A transformer of these shapes with random weights, drawn on `device`, in the dtypes of the released files.

    Matrix products keep the scale of what passes through; gates and modulations are far from zero, so that the sixty
    blocks of a random Pro still say something. Modulation is float32 in base models and `dtype` in distilled ones.
    """
    with torch.device("meta"):
        model = Transformer(config)
    generator = torch.Generator(device).manual_seed(seed)
    modulation = dtype if config.grid > 1 else torch.float32
    for name, parameter in list(model.named_parameters()):
        kept = torch.float32 if "_embeddings." in name else modulation if "modulation" in name else dtype
        value = torch.empty(parameter.shape, device=device, dtype=kept)
        if name.endswith("norm.weight"):
            value.normal_(1.0, 0.1, generator=generator)
        else:
            fan_in = parameter.shape[-1] if parameter.ndim > 1 else 400
            value.normal_(0.0, (0.2 if "modulation" in name else 1.0) / fan_in**0.5, generator=generator)
        _replace(model, name, value)
    return model.eval().requires_grad_(False)


def _replace(model: nn.Module, name: str, value: Tensor) -> None:
    path, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(path), leaf, nn.Parameter(value, requires_grad=False))


@dataclass(frozen=True)
class Inputs:
    """Random inputs of one forward: video (1, T, Y, X, 33), audio (1, A, 40), text, pooled text, timestep."""

    video: Tensor
    audio: Tensor
    text: Tensor
    pooled: Tensor
    timestep: Tensor


def random_inputs(
    config: TransformerConfig, geometry: Geometry, text_tokens: int, device: torch.device, dtype: torch.dtype
) -> Inputs:
    generator = torch.Generator(device).manual_seed(1)
    draw: dict[str, Any] = {"generator": generator, "device": device}
    video = torch.randn(1, *geometry.latents, config.visual_in, **draw)
    video[..., config.in_visual_dim :] = 0
    return Inputs(
        video.to(dtype),
        torch.randn(1, geometry.audio_tokens, config.in_audio_dim, **draw).to(dtype),
        torch.randn(1, text_tokens, config.in_text_dim, **draw).to(dtype),
        torch.randn(1, config.in_text_dim2, **draw).to(dtype),
        torch.full((1,), 617.25, device=device),
    )
