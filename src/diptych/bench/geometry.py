"""What is benchmarked: a model by name, a clip by its size, and random weights made on the device."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from diptych.errors import RequestError
from diptych.model.config import LITE, PRO, TINY, TransformerConfig
from diptych.model.transformer import Transformer

MODELS: dict[str, TransformerConfig] = {
    "pro": PRO,
    "lite": LITE,
    "pro-distill": PRO.distilled(),
    "lite-distill": LITE.distilled(),
    "tiny": TINY,
    "tiny-distill": TINY.distilled(),
}
TEXT_TOKENS = 200


@dataclass(frozen=True)
class Geometry:
    """A clip by width, height (pixels) and frames at 24 fps; written `864x480x125`."""

    width: int
    height: int
    frames: int

    @classmethod
    def parse(cls, text: str) -> Geometry:
        """Raises `RequestError` for anything but WIDTHxHEIGHTxFRAMES in steps of 16 pixels and 1 + 4n frames."""
        match = re.fullmatch(r"(\d+)x(\d+)x(\d+)", text)
        width, height, frames = map(int, match.groups()) if match else (0, 0, 0)
        if not (width and height and frames) or width % 16 or height % 16 or frames % 4 != 1:
            raise RequestError(
                "geometry", text, "write WIDTHxHEIGHTxFRAMES, sides in steps of 16, 1 + 4n frames, as 864x480x125"
            )
        return cls(width, height, frames)

    @property
    def latents(self) -> tuple[int, int, int]:
        """Frames, rows and columns of the latent video."""
        return (self.frames - 1) // 4 + 1, self.height // 8, self.width // 8

    @property
    def tokens(self) -> int:
        T, Y, X = self.latents
        return T * (Y // 2) * (X // 2)

    @property
    def audio_tokens(self) -> int:
        return math.ceil(self.frames / 24 * 44_100 / 1024)

    def __str__(self) -> str:
        return f"{self.width}x{self.height}x{self.frames}"


def config_named(name: str, blocks: int | None = None) -> TransformerConfig:
    """The configuration called `name`, with its first `blocks` fused blocks. Raises `RequestError` for another name."""
    if name not in MODELS:
        raise RequestError("model", name, "use one of " + ", ".join(MODELS))
    config = MODELS[name]
    if blocks is None:
        return config
    if not 1 <= blocks <= config.num_visual_blocks:
        raise RequestError("blocks", blocks, f"{name} has 1 to {config.num_visual_blocks} fused blocks")
    return replace(config, num_visual_blocks=blocks)


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
