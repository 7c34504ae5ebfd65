"""What docs/examples/two_t4.py takes of a card, stage by stage, on one GPU held to the memory of a T4.

    python benchmarks/two_t4_memory.py [--tiny] [--cap 15GiB] [--out FILE.json]

Random weights of the released shapes, float16, the first of two ranks, whose collectives go to torch's fake process
group: that returns at once with tensors of the right size. Kernels that a T4 lacks are not used. torch is held to
the cap less what CUDA takes, so that a stage that needs more fails here as there. Prints predicted and measured peaks.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from diptych.attention import Role
from diptych.bench.forward import machine
from diptych.bench.geometry import Geometry, config_named, random_transformer
from diptych.bench.layouts import process_group
from diptych.bench.random_clip import denoised
from diptych.codecs.audio import decode_audio
from diptych.codecs.tiles import plan_tiles
from diptych.codecs.video import decode_cost, decode_tile
from diptych.engine.sharing import sharing_for
from diptych.memory.footprint import GIB, RELEASED, Size
from diptych.model import tiny
from diptych.model.ops import plain_only
from diptych.parallel import Layout
from diptych.planner.options import pick_bytes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYOUT = Layout(ulysses=2)
TEXT = 1024
STEPS = 2
QWEN = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
}
"""The language model of Qwen2.5-VL-7B."""


def empty(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A module on meta, on the device with small random weights."""
    module = module.to_empty(device=DEVICE).to(dtype).eval().requires_grad_(False)
    for parameter in module.parameters():
        parameter.normal_(0.0, 0.02)
    for name, buffer in module.named_buffers():
        if "inv_freq" in name:
            buffer.copy_(torch.logspace(0, -6, buffer.numel(), device=DEVICE))
    return module


def language(small: bool) -> None:
    """The longest prompt with its template through the language model."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLTextModel

    sizes = QWEN | ({"hidden_size": 56, "intermediate_size": 64, "num_hidden_layers": 2} if small else {})
    sizes |= (
        {"vocab_size": 500, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [0, 1, 0]}}
        if small
        else {}
    )
    torch.set_default_dtype(torch.float16)
    with torch.device("meta"):
        model = Qwen2_5_VLTextModel(Qwen2_5_VLConfig(text_config=sizes).text_config)
    torch.set_default_dtype(torch.float32)
    model = empty(model, torch.float16)
    model(input_ids=torch.zeros((1, TEXT + 129), dtype=torch.long, device=DEVICE), use_cache=False)


def denoise(geometry: Geometry, small: bool) -> None:
    config = config_named("tiny" if small else "lite", None).distilled()
    with process_group(LAYOUT, DEVICE, simulate=True):
        sharing = sharing_for(LAYOUT, DEVICE, dict.fromkeys(Role, "sdpa-efficient") if DEVICE.type == "cuda" else None)
        model = random_transformer(config, DEVICE, torch.float16)
        for name, parameter in model.named_parameters():  # the recipe holds it so, whatever the files hold
            if "modulation" in name:
                parameter.data = parameter.data.float()
        text = torch.randn(1, TEXT, config.in_text_dim, device=DEVICE).half()
        context = model.context(text, torch.randn(1, config.in_text_dim2, device=DEVICE), None)
        with plain_only():
            denoised(model, [context], geometry, sharing, device=DEVICE, steps=STEPS)


def video_vae(small: bool) -> Any:
    from diffusers import AutoencoderKLHunyuanVideo

    vae = tiny.video_vae() if small else AutoencoderKLHunyuanVideo()
    return vae.to(DEVICE, torch.float32).eval().requires_grad_(False)


def picture(geometry: Geometry, small: bool, budget: int) -> None:
    """The first tiles of the plan: all are alike."""
    vae = video_vae(small)
    weights = sum(parameter.nbytes for parameter in vae.parameters())
    plan = plan_tiles(*geometry.latents, budget - weights, decode_cost(vae))
    latents = torch.randn(16, *geometry.latents, device=DEVICE)
    canvas = torch.zeros(3, 17, plan.height, plan.width, device=DEVICE)
    for tile in plan.tiles[:2]:
        pixels = decode_tile(vae, latents, tile)
        canvas[:, : pixels.shape[1], : pixels.shape[2], : pixels.shape[3]] += pixels[:, :17]


def sound(geometry: Geometry, small: bool) -> None:
    from diffusers import MMAudioVAE, MMAudioVocoder

    audio = tiny.audio_vae(tiny.AUDIO_SCALING_BASE) if small else MMAudioVAE()
    vocoder = tiny.vocoder() if small else MMAudioVocoder()
    parts = [x.to(DEVICE, torch.float32).eval().requires_grad_(False) for x in (audio, vocoder)]
    decode_audio(*parts, torch.randn(1, 40, geometry.audio_tokens, device=DEVICE), geometry.audio_tokens * 1024)


def measured(run: Callable[[], None]) -> dict[str, float]:
    """Peak GiB as torch was asked for them, as it held them, and seconds."""
    gc.collect()
    start = time.perf_counter()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    told: dict[str, Any] = {}
    try:
        run()
    except torch.OutOfMemoryError as error:
        told["failed"] = str(error)[:300]
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        told["allocated"] = torch.cuda.max_memory_allocated() / GIB
        told["reserved"] = torch.cuda.max_memory_reserved() / GIB
    return told | {"seconds": time.perf_counter() - start}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--cap", default="15GiB")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    recipe = importlib.util.spec_from_file_location("two_t4", Path(__file__).parents[1] / "docs/examples/two_t4.py")
    assert recipe is not None and recipe.loader is not None
    two_t4 = importlib.util.module_from_spec(recipe)
    recipe.loader.exec_module(two_t4)
    cap, small = pick_bytes("--cap", options.cap), options.tiny
    assert cap is not None
    budget = cap - two_t4.CONTEXT
    if DEVICE.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(budget / torch.cuda.mem_get_info()[1])
    report: dict[str, Any] = {"machine": machine(DEVICE), "cap": cap, "text": measured(lambda: language(small))}
    lines = [f"{'':14}{'stage':10}{'predicted':>10}{'allocated':>10}{'reserved':>10}   GiB, of {budget / GIB:.1f}"]
    for name in ("96x64x9",) if small else ("432x256x25", "864x480x121"):
        geometry = Geometry.parse(name)
        stages = {
            "text": report["text"],
            "denoise": measured(lambda g=geometry: denoise(g, small)),
            "picture": measured(lambda g=geometry: picture(g, small, budget)),
            "sound": measured(lambda g=geometry: sound(g, small)),
        }
        T, Y, X = geometry.latents
        size = Size(T=T, Y=Y, X=X, A=geometry.audio_tokens, L=TEXT, steps=10)
        expected = two_t4.count(config_named("lite", None).distilled(), RELEASED, size, LAYOUT, budget)
        report[name] = {k: v | {"predicted": expected[k].peak / GIB} for k, v in stages.items()}
        for stage, told in report[name].items():
            sizes = "".join(f"{told.get(key, 0.0):10.2f}" for key in ("predicted", "allocated", "reserved"))
            lines.append(f"{name:14}{stage:10}{sizes}   {told['seconds']:.1f} s {told.get('failed', '')[:60]}")
        if options.out is not None:
            options.out.write_text(json.dumps(report, indent=1))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
