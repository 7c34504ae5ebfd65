"""One forward of the transformer: how long, in how much memory, how far from the floor, and beside stock diffusers."""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from diptych.attention import Attend, LocalAttend
from diptych.bench import floors, profile
from diptych.bench.geometry import Geometry, Inputs, config_named, random_inputs, random_transformer
from diptych.bench.precision import in_precision, precision_for
from diptych.bench.stock import stock_forward, stock_transformer
from diptych.bench.timing import alternating, peak_memory
from diptych.model import ops
from diptych.model.transformer import Transformer
from diptych.sampling.denoiser import Denoiser


def forward_call(
    model: Transformer,
    inputs: Inputs,
    geometry: Geometry,
    attend: Attend,
    *,
    plain: bool = False,
    exact: Attend | None = None,
    exact_blocks: frozenset[int] = frozenset(),
) -> Callable[[], tuple[Tensor, Tensor | None]]:
    """One velocity, with what a request prepares once prepared beforehand. plain: without fused kernels.

    exact, exact_blocks: who attends in these blocks instead of `attend`.
    """
    with torch.no_grad():
        context = model.context(inputs.text, inputs.pooled, None)
    grid = model.grid(*geometry.latents, geometry.audio_tokens, tail=False, device=inputs.video.device)
    denoiser = Denoiser(model, attend, grid, [context], 1.0, exact=exact, exact_blocks=exact_blocks)
    timestep = inputs.timestep.cpu()[0]

    @torch.no_grad()
    def call() -> tuple[Tensor, Tensor | None]:
        with ExitStack() as stack:
            if plain:
                stack.enter_context(ops.plain_only())
            out = denoiser.lane(inputs.video, inputs.audio, timestep, context)
        return out.video, out.audio

    return call


@contextmanager
def shortened(model: Transformer) -> Iterator[None]:
    """The model with its first two blocks only: enough to compile kernels, plan attentions and connect ranks."""
    whole = model.visual_transformer_blocks
    model.visual_transformer_blocks = whole[:2]
    try:
        yield
    finally:
        model.visual_transformer_blocks = whole


def bench_forward(
    model_name: str,
    geometry: Geometry,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    blocks: int | None = None,
    text_tokens: int = 200,
    repeats: int = 3,
    against: str | None = None,
    plain: bool = False,
    precision: str = "exact",
    with_floor: bool = True,
    with_profile: bool = True,
) -> dict[str, Any]:
    """Time forwards of a model with random weights; everything is measured in this run, the rivals in turns.

    against: `diffusers` (stock, eager, as its pipeline calls it) or None. plain: also our path without fused kernels.
    precision: then also in this one, such as `fp8` or `fp8:first=2,last=2`. Raises `RequestError` for another.
    """
    config = config_named(model_name, blocks)
    approximate = precision_for(precision, config, device, dtype)
    ceilings = floors.measure(config, geometry, text_tokens, device, dtype) if with_floor else None
    model = random_transformer(config, device, dtype)
    inputs = random_inputs(config, geometry, text_tokens, device, dtype)
    ours = forward_call(model, inputs, geometry, LocalAttend())
    calls: dict[str, Callable[[], object]] = {"diptych": ours}
    if plain:
        calls["diptych, no fused kernels"] = forward_call(model, inputs, geometry, LocalAttend(), plain=True)
    stock = stock_transformer(model) if against == "diffusers" else None
    if stock is not None:
        calls["diffusers"] = stock_forward(stock, inputs, padded=True)
    times = alternating(calls, device, repeats)
    peaks = {name: peak_memory(call, device) for name, call in calls.items()}
    result: dict[str, Any] = {
        "model": model_name,
        "blocks": config.num_visual_blocks,
        "geometry": str(geometry),
        "text_tokens": text_tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "machine": machine(device),
    }
    if stock is not None:
        result["difference"] = relative(ours()[0], stock_forward(stock, inputs, padded=False)()[0])
    if with_profile:
        result["profile"] = profile.by_class(ours, device)
    calls.clear()
    del stock
    if approximate.kind == "fp8":
        exact = ours()[0]
        faster = forward_call(model, inputs, geometry, **in_precision(model, approximate, device))
        result["precision"] = str(approximate)
        times |= alternating({"diptych fp8": faster}, device, repeats)
        peaks["diptych fp8"] = peak_memory(faster, device)
        result["fp8_difference"] = relative(faster()[0], exact)
        if with_profile:
            result["fp8_profile"] = profile.by_class(faster, device)
    todo = floors.work(config, geometry, text_tokens)
    result |= {
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "all_seconds": times,
        "peak_bytes": peaks,
        "linear_operations": todo.linear_operations,
        "attention_operations": todo.attention_operations,
        "elementwise_bytes": todo.bytes,
    }
    if ceilings is not None:
        result["ceilings"] = floors.as_json(ceilings)
        result["floor"] = ceilings.floor(todo, config, geometry.tokens)
        result["over_floor"] = result["seconds"]["diptych"] / result["floor"]["floor"]
    if against is not None:
        result["speedup"] = result["seconds"]["diffusers"] / result["seconds"]["diptych"]
    return result


def relative(got: Tensor, want: Tensor) -> float:
    """The norm of the difference over the norm of `want`."""
    return float((got.float() - want.float()).norm() / want.float().norm())


def machine(device: torch.device) -> dict[str, str]:
    """What the numbers were taken on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return {"device": name, "torch": str(torch.__version__), "cuda": str(torch.version.cuda)}
