"""One step of the sampler: all lanes of guidance through the denoiser, as a request runs it."""

from __future__ import annotations

import statistics
from typing import Any

import torch

from diptych.bench.forward import machine
from diptych.bench.geometry import Geometry, config_named, random_inputs, random_transformer
from diptych.bench.precision import in_precision, precision_for
from diptych.bench.timing import peak_memory, seconds
from diptych.sampling.denoiser import Denoiser
from diptych.sampling.latents import Latents

GUIDANCE = 5.0


def bench_step(
    model_name: str,
    geometry: Geometry,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    blocks: int | None = None,
    text_tokens: int = 200,
    repeats: int = 3,
    precision: str = "exact",
) -> dict[str, Any]:
    """Time guided velocities (two forwards; distilled models: one) of a model with random weights.

    precision: such as `fp8` or `fp8:first=2,last=2`. Raises `RequestError` for another.
    """
    config = config_named(model_name, blocks)
    arithmetic = precision_for(precision, config, device, dtype)
    model = random_transformer(config, device, dtype)
    inputs = random_inputs(config, geometry, text_tokens, device, dtype)
    lanes = 1 if config.grid > 1 else 2
    with torch.no_grad():
        contexts = [model.context(inputs.text, inputs.pooled * sign, None) for sign in (1, -1)[:lanes]]
    grid = model.grid(*geometry.latents, geometry.audio_tokens, tail=False, device=device)
    attending = in_precision(model, arithmetic, device)
    denoiser = Denoiser(model, grid=grid, contexts=contexts, guidance=GUIDANCE if lanes == 2 else 1.0, **attending)
    latents = Latents(inputs.video[..., : config.in_visual_dim].float(), inputs.audio.float())
    timestep = inputs.timestep.cpu()[0]

    @torch.no_grad()
    def step() -> Latents:
        return denoiser.velocity(latents, timestep)

    times = seconds(step, device, repeats)
    return {
        "model": model_name,
        "blocks": config.num_visual_blocks,
        "geometry": str(geometry),
        "text_tokens": text_tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "precision": str(arithmetic),
        "machine": machine(device),
        "forwards": lanes,
        "seconds": {"step": statistics.median(times), "forward": statistics.median(times) / lanes},
        "all_seconds": times,
        "peak_bytes": {"step": peak_memory(step, device)},
    }
