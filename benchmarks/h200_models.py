"""Sections about whole models: forwards by precision, decodes, exactness."""

# ruff: noqa: B023 - every call is made before its loop goes on
from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from diptych.bench import profile
from diptych.bench.forward import forward_call, relative, shortened
from diptych.bench.geometry import Inputs, config_named, random_inputs, random_transformer
from diptych.bench.stock import stock_forward, stock_transformer
from diptych.bench.timing import once, peak_memory, seconds
from diptych.model.transformer import Modulations, TextContext, Transformer
from h200_clips import step_cache, traced
from h200_common import DEVICE, HALF, OURS, SIZE, TEXT, TINY, free, randn, tried, wait


def exactness() -> dict[str, Any]:
    """Four blocks at full width and length: fused and plain bf16 against float32."""
    config = config_named("tiny" if TINY else "pro", 3 if TINY else 4)
    model = random_transformer(config, DEVICE, HALF)
    inputs = random_inputs(config, SIZE, TEXT, DEVICE, HALF)
    from diptych.attention import LocalAttend

    fast = forward_call(model, inputs, SIZE, LocalAttend())()
    slow = forward_call(model, inputs, SIZE, LocalAttend("sdpa-flash"), plain=True)()
    for parameter in model.parameters():
        parameter.data = parameter.data.float()
    wide = type(inputs)(*(getattr(inputs, name).float() for name in ("video", "audio", "text", "pooled", "timestep")))
    torch.backends.cuda.matmul.allow_tf32 = False
    exact = forward_call(model, wide, SIZE, LocalAttend())()
    out = {}
    for index, side in enumerate(("video", "audio")):
        errors = [relative(run[index], exact[index]) for run in (fast, slow)]
        out[side] = {"fused": errors[0], "plain": errors[1], "ratio": errors[0] / errors[1]}
    return out


def precisions(name: str, repeats: int) -> dict[str, Any]:
    """bf16, fp8 products, fp8 products and attention, beside stock diffusers; modulation from tables.

    With `--ours` only bf16 and full fp8. Pro then also with a step cache, Lite traced.
    """
    from diptych.attention import APPROXIMATE, LocalAttend
    from diptych.memory import fp8

    config = config_named("tiny" if TINY else name)
    model = random_transformer(config, DEVICE, HALF)
    inputs = random_inputs(config, SIZE, TEXT, DEVICE, HALF)
    exact = LocalAttend()
    approximate = LocalAttend(APPROXIMATE)
    result: dict[str, Any] = {}
    with torch.no_grad():
        context = model.context(inputs.text, inputs.pooled, None)
    modulations = model.modulations(inputs.timestep, context, audio=True)
    reference = None
    if OURS:
        if name == "pro":
            result["cache"] = tried(step_cache, model, inputs)
        else:
            result["trace"] = tried(traced, model, inputs)
    else:
        reference = beside_stock(model, inputs, name, result)
        modulations = tabled(model, inputs, context, modulations, result)
    grid = model.grid(*SIZE.latents, SIZE.audio_tokens, tail=False, device=DEVICE)

    def call(attend: Any) -> Callable[[], Any]:
        @torch.no_grad()
        def forward() -> Any:
            streams = model.embed(inputs.video, inputs.audio, context, grid, modulations, attend)
            video, audio = model.head(model.blocks(streams, attend, own=True))
            return model.unpatchify(video, grid), audio

        return forward

    def record(label: str, forward: Callable[[], Any], want: Any) -> Any:
        """The first call (with `--ours` of two blocks), then timed ones, of which the last tells the peak."""
        start = time.perf_counter()
        with shortened(model) if OURS else nullcontext():
            forward()
            wait()
        first = time.perf_counter() - start
        times: list[float] = seconds(forward, DEVICE, repeats - 1, warmup=0)
        kept: list[Any] = []
        peak = peak_memory(lambda: times.append(once(lambda: kept.append(forward()), DEVICE)), DEVICE)
        result[label] = {
            "first": first,
            "seconds": times,
            "peak GiB": peak / 2**30,
            "difference": None if want is None else [relative(g, w) for g, w in zip(kept[0], want, strict=True)],
        }
        return kept[0]

    fast = record("bf16", call(exact), reference)
    if not OURS or name == "lite":
        result["bf16 profile"] = profile.by_class(call(exact), DEVICE, top=30)
    start = time.perf_counter()
    fp8.quantise(model)
    free()
    wait()
    result["quantised in"] = time.perf_counter() - start
    result["allocated after quantising GiB"] = torch.cuda.memory_allocated() / 2**30 if DEVICE.type == "cuda" else 0
    if not OURS:
        record("fp8 products", call(exact), fast)
    record("fp8 products and attention", call(approximate), fast)
    result["fp8 profile"] = profile.by_class(call(approximate), DEVICE, top=30)
    return result


def beside_stock(model: Transformer, inputs: Inputs, name: str, result: dict[str, Any]) -> Any:
    """Stock diffusers with the same weights: its seconds into `result`, its velocity of unpadded text returned."""
    stock = stock_transformer(model)
    unpadded = stock_forward(stock, inputs, padded=False)
    reference = unpadded()
    result["stock"] = seconds(stock_forward(stock, inputs, padded=not TINY), DEVICE, 1, warmup=0)
    if name != "pro":
        result["stock, text unpadded"] = seconds(unpadded, DEVICE, 1, warmup=0)
        stock.set_attention_backend("_native_cudnn" if DEVICE.type == "cuda" else "native")
        stock.compile_repeated_blocks(fullgraph=True)
        start = time.perf_counter()
        unpadded()
        wait()
        result["stock, compiled, cuDNN, text unpadded: first forward"] = time.perf_counter() - start
        result["stock, compiled, cuDNN, text unpadded"] = seconds(unpadded, DEVICE, 2, warmup=0)
    return reference


def tabled(
    model: Transformer, inputs: Inputs, context: TextContext, direct: Modulations, result: dict[str, Any]
) -> Modulations:
    """The modulation weights parked; the tables' seconds and whether they equal `direct` into `result`."""
    from diptych.memory.tables import ModulationTables, park

    start = time.perf_counter()
    park(model)
    result["parked in"] = time.perf_counter() - start
    start = time.perf_counter()
    steps = torch.cat([inputs.timestep.cpu(), torch.linspace(1000, 20, 49)])
    tables = ModulationTables(model, steps, [context], audio=True)
    wait()
    result["tables of 50 steps in"] = time.perf_counter() - start
    modulations = tables.at(steps[0], context)
    pairs = zip(direct.blocks, modulations.blocks, strict=True)
    result["tables equal"] = all(torch.equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))
    free()
    return modulations


def decode_whole() -> dict[str, Any]:
    """A whole clip through the video VAE, windows blended: our decoder and diffusers'; errors of one window."""
    from diffusers import AutoencoderKLHunyuanVideo

    from diptych.codecs.tiles import plan_tiles
    from diptych.codecs.vae_fast import FastDecoder
    from diptych.codecs.video import decode_video

    widths = {"block_out_channels": (16, 16, 32, 32), "norm_num_groups": 4, "layers_per_block": 1} if TINY else {}
    torch.manual_seed(0)
    half = torch.float32 if TINY else torch.float16
    vae = AutoencoderKLHunyuanVideo(**widths).to(DEVICE, half).eval().requires_grad_(False)
    T, Y, X = (2, 1, 2) if TINY else SIZE.latents
    latents = randn(1, 16, T, Y, X, dtype=torch.float32)
    plan = plan_tiles(T, Y, X)
    stock, fast = vae.decoder, FastDecoder(vae.decoder)
    result: dict[str, Any] = {"windows": len(plan.tiles)}
    clips = {}
    for name, decoder, warm in (("diptych", fast, 1), ("diffusers' decoder", stock, 0)):
        vae.decoder = decoder
        for _ in range(warm + 1):
            start = time.perf_counter()
            clips[name] = decode_video(vae, latents, plan)
            result[name] = time.perf_counter() - start
        if name == "diptych":
            small = plan_tiles(T, Y, X, 6 << 30, fast.cost)

            def within() -> None:
                start = time.perf_counter()
                decode_video(vae, latents, small)
                result["within 6 GiB"] = [len(small.tiles), time.perf_counter() - start]

            within()
            result["within 6 GiB, peak GiB"] = peak_memory(within, DEVICE) / 2**30
            if OURS:
                result["diptych peak GiB"] = peak_memory(lambda: decode_video(vae, latents, plan), DEVICE) / 2**30
                return result
        result[f"{name} peak GiB"] = peak_memory(lambda: decode_video(vae, latents, plan), DEVICE) / 2**30
    difference = abs(clips["diptych"].astype("int16") - clips["diffusers' decoder"].astype("int16"))
    result["pixels that differ, most"] = [float((difference > 0).mean()), int(difference.max())]
    result["profile"] = profile.by_class(lambda: FastDecoder.forward(fast, latents[:, :, :5].to(half)), DEVICE, top=12)
    window = latents[:, :, :5, : Y // 2, : X // 2].to(half) if not TINY else latents
    with torch.no_grad():
        ours, theirs = fast(window), stock(window)
        exact = stock.float()(window.float())
    result["error of one window to float32: ours, diffusers'"] = [relative(ours, exact), relative(theirs, exact)]
    return result


def compiled() -> dict[str, Any]:
    """A block under torch.compile beside the hand-written kernels: the same model, two blocks."""
    from diptych.attention import LocalAttend

    config = config_named("tiny" if TINY else "pro", 2)
    model = random_transformer(config, DEVICE, HALF)
    inputs = random_inputs(config, SIZE, TEXT, DEVICE, HALF)
    attend = LocalAttend("sdpa-math" if TINY else "sdpa-cudnn")
    times = {"fused kernels": min(seconds(forward_call(model, inputs, SIZE, attend), DEVICE, 3))}
    for block in model.fused_blocks:
        block.compile()
    call = forward_call(model, inputs, SIZE, attend, plain=True)
    start = time.perf_counter()
    call()
    times["compile"] = time.perf_counter() - start
    times["compiled"] = min(seconds(call, DEVICE, 3))
    return times
