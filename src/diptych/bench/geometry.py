"""What is benchmarked: random weights of a model and random inputs of a clip's size, made on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diptych.memory.fp8 import quantise
from diptych.model.config import TransformerConfig
from diptych.model.loading import place_plain
from diptych.model.transformer import Transformer
from diptych.parallel.tensor import split_model
from diptych.parallel.weights import WeightSplit
from diptych.planner.geometry import MODELS as MODELS
from diptych.planner.geometry import TEXT_TOKENS as TEXT_TOKENS
from diptych.planner.geometry import Geometry as Geometry
from diptych.planner.geometry import config_named as config_named


def random_transformer(
    config: TransformerConfig,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    *,
    split: WeightSplit | None = None,
    fp8: bool = False,
) -> Transformer:
    """A transformer of these shapes with random weights, drawn on `device`, in the dtypes of the released files.

    Matrix products keep the scale of what passes through; gates and modulations are far from zero, so that the sixty
    blocks of a random Pro still say something. Modulation is float32 in base models and `dtype` in distilled ones.
    split: this rank's part of the same weights; all ranks call it together. fp8: quantised tensor by tensor.
    """
    with torch.device("meta"):
        shapes = {name: tuple(parameter.shape) for name, parameter in Transformer(config).named_parameters()}
        model = Transformer(config)
        split = split or WeightSplit()
        cuts = split_model(model, split)
        if fp8:
            quantise(model)
    shards, place = None, place_plain
    if split.shard is not None:
        from diptych.parallel.shards import Shards

        shards = Shards(model, split.shard, cuts)
        cuts, place = shards.cuts, shards.place
    here = set(model.state_dict())
    generator = torch.Generator(device).manual_seed(seed)
    modulation = dtype if config.grid > 1 else torch.float32
    for name, shape in shapes.items():
        kept = torch.float32 if "_embeddings." in name else modulation if "modulation" in name else dtype
        value = torch.empty(shape, device=device, dtype=kept)
        if name.endswith("norm.weight"):
            value.normal_(1.0, 0.1, generator=generator)
        else:
            fan_in = shape[-1] if len(shape) > 1 else 400
            value.normal_(0.0, (0.2 if "modulation" in name else 1.0) / fan_in**0.5, generator=generator)
        if name in here:
            for dim, start, stop in cuts.get(name, ()):
                value = value.narrow(dim, start, stop - start)
            place(model, name, value.clone() if name in cuts else value)
    if shards is not None:
        shards.ready()
    return model.eval().requires_grad_(False)


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
