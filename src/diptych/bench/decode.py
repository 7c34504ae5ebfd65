"""The video VAE: how long a clip takes to decode, in how much memory, and beside diffusers' own decoder."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from diptych.bench.forward import machine
from diptych.bench.geometry import Geometry
from diptych.bench.timing import alternating, peak_memory
from diptych.codecs.tiles import plan_tiles
from diptych.codecs.vae_fast import fuse
from diptych.codecs.video import decode_cost, decode_video
from diptych.model.tiny import video_vae


def bench_decode(
    geometry: Geometry,
    *,
    device: torch.device,
    tiny: bool = False,
    budget: int | None = None,
    repeats: int = 3,
    against: str | None = None,
) -> dict[str, Any]:
    """Decode random latents with random weights of the released VAE's shapes (tiny: of the tiny checkpoint's).

    float16 on a GPU, float32 on a CPU. budget: bytes, as `--decode-budget`. against: `diffusers`, the stock decoder in
    the windows and tiles of its own plan, or None.
    """
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    vae = _vae(tiny, device, dtype)
    generator = torch.Generator(device).manual_seed(1)
    latents = torch.randn(1, 16, *geometry.latents, generator=generator, device=device)
    stock = vae.decoder
    fast = fuse(vae).decoder
    calls: dict[str, Callable[[], object]] = {}
    plans: dict[str, int] = {}
    clips: dict[str, Any] = {}

    def add(name: str, decoder: Any) -> None:
        vae.decoder = decoder
        plan = plan_tiles(*geometry.latents, budget, decode_cost(vae))
        plans[name] = len(plan.tiles)

        def call() -> object:
            vae.decoder = decoder
            clips[name] = decode_video(vae, latents, plan)
            return clips[name]

        calls[name] = call

    add("diptych", fast)
    if against == "diffusers":
        add("diffusers", stock)
    times = alternating(calls, device, repeats)
    result: dict[str, Any] = {
        "geometry": str(geometry),
        "dtype": str(dtype).removeprefix("torch."),
        "budget": budget,
        "machine": machine(device),
        "tiles": plans,
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "all_seconds": times,
        "peak_bytes": {name: peak_memory(call, device) for name, call in calls.items()},
    }
    if against == "diffusers":
        result["speedup"] = result["seconds"]["diffusers"] / result["seconds"]["diptych"]
        apart = np.abs(clips["diptych"].astype(np.int16) - clips["diffusers"].astype(np.int16))
        result["pixels_apart"] = {"share": float((apart > 0).mean()), "most": int(apart.max())}
    return result


def _vae(tiny: bool, device: torch.device, dtype: torch.dtype) -> Any:
    from diffusers import AutoencoderKLHunyuanVideo

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        vae = video_vae() if tiny else AutoencoderKLHunyuanVideo()
    return vae.to(device, dtype).eval().requires_grad_(False)
