"""One call on a lent GPU: check kernels against their twins, tune them, and time forwards and decodes in one run.

    python benchmarks/h200_session.py OUT_FOLDER [section ...]

Each section is tried on its own, so that one failure does not lose the rest; results go to OUT_FOLDER/session.json
after every section, a short table is printed last. `--tiny` runs every section at toy sizes on whatever is there.
"""

# ruff: noqa: B023 - every call is made before its loop goes on
from __future__ import annotations

import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diptych.attention import kernels as attention_kernels
from diptych.bench import floors, profile
from diptych.bench.forward import forward_call, machine, relative
from diptych.bench.geometry import Geometry, config_named, random_inputs, random_transformer
from diptych.bench.stock import stock_forward, stock_transformer
from diptych.bench.timing import median, peak_memory, seconds
from diptych.model import plain
from diptych.model.rope import rope_1d

TINY = "--tiny" in sys.argv
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16
SIZE = Geometry.parse("96x64x9" if TINY else "864x480x125")
TEXT = 9 if TINY else 200
RESULTS: dict[str, Any] = {}


def ms(call: Callable[[], object], repeats: int = 10) -> float:
    return median(call, DEVICE, repeats=repeats, warmup=2) * 1e3


def randn(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)


def fused() -> dict[str, Any]:
    """Element-wise kernels: correct, and which tile is fastest."""
    from diptych.model.kernels import adaln, rotate

    out: dict[str, Any] = {}
    S = SIZE.tokens
    for D, H, K in ((80, 5, 16),) if TINY else ((4096, 32, 128), (1792, 28, 64)):
        x, y = randn(1, S, D), randn(1, S, D)
        gate, shift, scale = randn(1, 9 * D, dtype=torch.float32).chunk(9, dim=-1)[:3]
        q, k, w = x.view(1, S, H, K), y.view(1, S, H, K), randn(K)
        rope = rope_1d(S, K, DEVICE)
        want = plain.gated_scale_shift(x, y, gate, shift, scale)
        got = adaln.gated_scale_shift(x, y, gate, shift, scale)
        out[f"error adaln {D}"] = [relative(g, r) for g, r in zip(got, want, strict=True)]
        out[f"error rotate {D}"] = relative(rotate.norm_rotate(q, w, rope), plain.norm_rotate(q, w, rope))
        del want, got
        passes = S * D * 2
        for rows in (1, 4, 8):
            for warps in (4, 8, 16):
                adaln.tuning = lambda S, D, r=rows, n=warps: {"ROWS": r, "num_warps": n}  # type: ignore[misc]
                spent = ms(lambda: adaln.gated_scale_shift(x, y, gate, shift, scale))
                out[f"adaln {D} rows {rows} warps {warps}"] = [spent, 4 * passes / spent / 1e9]
        for rows in (1, 4):
            for warps in (4, 8):
                rotate.tuning = lambda S, width, r=rows, n=warps: {"ROWS": r, "num_warps": n}  # type: ignore[misc]
                spent = ms(lambda: rotate.norm_rotate_pair(q, k, w, w, rope))
                out[f"rotate {D} rows {rows} warps {warps}"] = [spent, (4 * passes + 2 * S * K * 2) / spent / 1e9]
        hidden = randn(1, S, 4 * D)
        out[f"gelu {D}"] = ms(lambda: torch.nn.functional.gelu(hidden))
        out[f"gelu in place {D}"] = ms(lambda: torch.ops.aten.gelu_(hidden))
    import importlib

    importlib.reload(adaln)
    importlib.reload(rotate)
    return out


def cross() -> dict[str, Any]:
    """Attentions with one short side, by every kernel."""
    out: dict[str, Any] = {}
    S, A = SIZE.tokens, SIZE.audio_tokens
    for name, H, K, Q, N in (
        ("text", 32, 128, S, TEXT),
        ("video from audio", 32, 128, S, A),
        ("audio from video", 16, 128, A, S),
        ("audio self", 16, 128, A, A),
        ("lite text", 28, 64, S, TEXT),
        ("lite audio from video", 14, 64, A, S),
    ):
        q, k, v = randn(1, Q, H, K), randn(1, N, H, K), randn(1, N, H, K)
        need = attention_kernels.need_of(q, k, None, lse=False)
        for kernel in attention_kernels.KERNELS:
            if kernel.refusal(need) is None and kernel.name not in ("sdpa-math", "sdpa-efficient"):
                out[f"{name}: {kernel.name}"] = ms(lambda kernel=kernel, q=q, k=k, v=v: kernel(q, k, v))
        from diptych.attention import cores

        if cores._fa3_func is not None:
            reference = attention_kernels.pick("sdpa-flash", need)(q, k, v)
            for splits in (0, 2, 4, 8, 16) if Q < 1000 else (0,):
                run = lambda splits=splits, q=q, k=k, v=v: cores._fa3_func(q, k, v, num_splits=splits)  # noqa: E731
                error = relative(run(), reference)
                out[f"{name}: fa3 splits {splits}"] = [ms(run), error]
            padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % 128)) for x in (k, v)]
            out[f"{name}: fa3 keys to 128"] = ms(lambda q=q, p=padded: cores._fa3_func(q, *p))
    return out


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


def forwards(name: str, repeats: int) -> dict[str, Any]:
    """Whole forwards: ours, ours without fused kernels, stock; in turns."""
    from diptych.attention import LocalAttend

    config = config_named(name)
    start = time.perf_counter()
    model = random_transformer(config, DEVICE, HALF)
    inputs = random_inputs(config, SIZE, TEXT, DEVICE, HALF)
    made = time.perf_counter() - start
    attend = LocalAttend()
    ours = forward_call(model, inputs, SIZE, attend)
    start = time.perf_counter()
    ours()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    first = time.perf_counter() - start
    stock = stock_transformer(model)
    times = {"diptych": seconds(ours, DEVICE, repeats, warmup=0)}
    if name != "pro":
        plain_call = forward_call(model, inputs, SIZE, attend, plain=True)
        times["plain"] = seconds(plain_call, DEVICE, repeats)
    unpadded = stock_forward(stock, inputs, padded=False)
    difference = relative(ours()[0], unpadded()[0])
    times["diffusers, text unpadded"] = seconds(unpadded, DEVICE, 0 if name == "pro" else repeats, warmup=0)
    times["diffusers"] = seconds(stock_forward(stock, inputs, padded=not TINY), DEVICE, 1, warmup=0)
    times["diptych"] += seconds(ours, DEVICE, 1, warmup=0)
    todo = floors.work(config, SIZE, TEXT)
    ceilings = floors.measure(config, SIZE, TEXT, DEVICE, HALF)
    floor = ceilings.floor(todo, config, SIZE.tokens)
    return {
        "weights made in": made,
        "first forward": first,
        "times": times,
        "peak GiB": peak_memory(ours, DEVICE) / 2**30,
        "difference to diffusers": difference,
        "ceilings": floors.as_json(ceilings),
        "floor": floor,
        "over floor": statistics.median(times["diptych"]) / floor["floor"],
        "profile": profile.by_class(ours, DEVICE, top=40),
    }


def fp8_parts() -> dict[str, Any]:
    """The parts of fp8: what each costs, and how far it is off."""
    from diptych.attention import LocalAttend, Role
    from diptych.attention import fp8 as fp8_attention
    from diptych.attention.cores import fa3_call
    from diptych.model.fp8 import Fp8Linear
    from diptych.model.kernels import quantise

    out: dict[str, Any] = {}
    S = SIZE.tokens
    hidden = randn(1, S, 128 if TINY else 16384)
    out["gelu aten"] = ms(lambda: torch.nn.functional.gelu(hidden))
    out["gelu triton in place"] = ms(lambda: quantise.gelu_(hidden))
    out["gelu and rows"] = ms(lambda: quantise.to_rows(hidden, gelu=True))
    for N, K in ((80, 128),) if TINY else ((4096, 4096), (16384, 4096), (4096, 16384), (2048, 4096), (1792, 1792)):
        x, linear = randn(1, S, K), torch.nn.Linear(K, N, device=DEVICE, dtype=HALF)
        layer = Fp8Linear.quantised(linear)
        rows = quantise.to_rows(x)
        spent = ms(lambda: layer(rows))
        exact = torch.nn.functional.linear(x[:, :2048].float(), linear.weight.float(), linear.bias.float())
        out[f"fp8 linear {K}->{N}"] = {
            "TFLOP/s": 2 * S * N * K / spent / 1e9,
            "rows ms": ms(lambda: quantise.to_rows(x)),
            "error": relative(layer(x)[:, :2048], exact),
            "bf16 error": relative(linear(x)[:, :2048], exact),
        }
    for H, K in ((5, 16),) if TINY else ((32, 128), (28, 64)):
        q, k, v = randn(1, S, H, K), randn(1, S, H, K), randn(1, S, H, K)
        rope = rope_1d(S, K, DEVICE)
        q, k = plain.norm_rotate(q, randn(K), rope), plain.norm_rotate(k, randn(K), rope)
        scaled_q, scaled_k = fp8_attention.quantise(q, smooth=False), fp8_attention.quantise(k, smooth=True)
        scaled_v = fp8_attention.quantise(v, smooth=False)
        label = f"{H} heads of {K}"
        out[f"{label}: quantise one"] = ms(lambda: fp8_attention.quantise(k, smooth=True))
        if DEVICE.type == "cuda":
            scales = {"q_descale": scaled_q.scale, "k_descale": scaled_k.scale, "v_descale": scaled_v.scale}
            out[f"{label}: kernel"] = ms(
                lambda: fa3_call(scaled_q.values, scaled_k.values, scaled_v.values, False, **scales), 5
            )
            fast = LocalAttend("fa3-fp8")
            out[f"{label}: fa3-fp8"] = ms(lambda: fast(Role.VISUAL_SELF, q, k, v), 5)
            out[f"{label}: fa3 bf16"] = ms(lambda: LocalAttend("fa3")(Role.VISUAL_SELF, q, k, v), 5)
            want, lse = LocalAttend("fa3").with_lse(Role.VISUAL_SELF, q, k, v)
            got, got_lse = fast.with_lse(Role.VISUAL_SELF, q, k, v)
            out[f"{label}: error"] = [relative(got, want), float((got_lse - lse).abs().max())]
            bias = randn(1, 1, H, K) * 4  # channels that all keys share, as trained models have
            want = LocalAttend("fa3")(Role.VISUAL_SELF, q, k + bias, v)
            out[f"{label}: error with shared channels"] = relative(fast(Role.VISUAL_SELF, q, k + bias, v), want)
    return out


def new_text_length() -> dict[str, Any]:
    """What cuDNN takes to plan an attention it has not seen: a prompt of another length."""
    out = {}
    for L in (201, 317):
        q, k = randn(1, SIZE.tokens, 32, 128), randn(1, L, 32, 128)
        need = attention_kernels.need_of(q, k, None, lse=False)
        kernel = attention_kernels.pick("auto", need)
        for turn in ("first", "second"):
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            kernel(q, k, k)
            if DEVICE.type == "cuda":
                torch.cuda.synchronize()
            out[f"{L} keys, {turn}, {kernel.name}"] = time.perf_counter() - start
    return out


def precisions(name: str, repeats: int) -> dict[str, Any]:
    """bf16, fp8 products, fp8 products and attention, beside stock diffusers; modulation from tables."""
    from diptych.attention import LocalAttend, Role
    from diptych.memory import fp8
    from diptych.memory.tables import ModulationTables, park

    config = config_named(name)
    model = random_transformer(config, DEVICE, HALF)
    inputs = random_inputs(config, SIZE, TEXT, DEVICE, HALF)
    exact = LocalAttend()
    approximate = exact if DEVICE.type != "cuda" else LocalAttend({Role.VISUAL_SELF: "fa3-fp8"})
    result: dict[str, Any] = {}
    reference = None
    if "--ours" not in sys.argv or name != "pro":
        stock = stock_transformer(model)
        unpadded = stock_forward(stock, inputs, padded=False)
        reference = unpadded()
        result["stock"] = seconds(stock_forward(stock, inputs, padded=not TINY), DEVICE, 1, warmup=0)
        if name != "pro":
            result["stock, text unpadded"] = seconds(unpadded, DEVICE, 1, warmup=0)
        del stock, unpadded
    with torch.no_grad():
        context = model.context(inputs.text, inputs.pooled, None)
    modulations = model.modulations(inputs.timestep, context, audio=True)
    if "--ours" not in sys.argv or name != "pro":
        start = time.perf_counter()
        park(model)
        result["parked in"] = time.perf_counter() - start
        start = time.perf_counter()
        steps = torch.cat([inputs.timestep.cpu(), torch.linspace(1000, 20, 49)])
        tables = ModulationTables(model, steps, [context], audio=True)
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        result["tables of 50 steps in"] = time.perf_counter() - start
        direct, modulations = modulations, tables.at(steps[0], context)
        pairs = zip(direct.blocks, modulations.blocks, strict=True)
        result["tables equal"] = all(torch.equal(a, b) for x, y in pairs for a, b in zip(x, y, strict=True))
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
    grid = model.grid(*SIZE.latents, SIZE.audio_tokens, tail=False, device=DEVICE)

    def call(attend: Any) -> Callable[[], Any]:
        @torch.no_grad()
        def forward() -> Any:
            streams = model.embed(inputs.video, inputs.audio, context, grid, modulations, attend)
            video, audio = model.head(model.blocks(streams, attend))
            return model.unpatchify(video, grid), audio

        return forward

    def record(label: str, forward: Callable[[], Any], want: Any) -> Any:
        start = time.perf_counter()
        got = forward()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        first = time.perf_counter() - start
        result[label] = {
            "first": first,
            "seconds": seconds(forward, DEVICE, repeats, warmup=0),
            "peak GiB": peak_memory(forward, DEVICE) / 2**30,
            "difference": None if want is None else [relative(g, w) for g, w in zip(got, want, strict=True)],
        }
        return got

    fast = record("bf16", call(exact), reference)
    if "--ours" not in sys.argv:
        result["bf16 profile"] = profile.by_class(call(exact), DEVICE, top=30)
    start = time.perf_counter()
    fp8.quantise(model)
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
    result["quantised in"] = time.perf_counter() - start
    result["allocated after quantising GiB"] = torch.cuda.memory_allocated() / 2**30 if DEVICE.type == "cuda" else 0
    if "--ours" not in sys.argv:
        record("fp8 products", call(exact), fast)
    record("fp8 products and attention", call(approximate), fast)
    result["fp8 profile"] = profile.by_class(call(approximate), DEVICE, top=30)
    return result


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
        for _ in range(0 if "--ours" in sys.argv else warm + 1):
            start = time.perf_counter()
            clips[name] = decode_video(vae, latents, plan)
            result[name] = time.perf_counter() - start
        if name == "diptych":
            small = plan_tiles(T, Y, X, 6 << 30, fast.cost)
            decode_video(vae, latents, small)
            start = time.perf_counter()
            decode_video(vae, latents, small)
            result["within 6 GiB"] = [len(small.tiles), time.perf_counter() - start]
            result["within 6 GiB, peak GiB"] = peak_memory(lambda: decode_video(vae, latents, small), DEVICE) / 2**30
            if "--ours" in sys.argv:
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


SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "fp8_parts": fp8_parts,
    "pro": lambda: precisions("tiny" if TINY else "pro", 1),
    "lite": lambda: precisions("tiny" if TINY else "lite", 2),
    "decode": decode_whole,
    "new_text_length": new_text_length,
    "cross": cross,
    "fused": fused,
    "forwards": lambda: forwards("tiny" if TINY else "pro", 2),
    "exactness": exactness,
    "compiled": compiled,
}


def short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: short(inner) for key, inner in value.items()}
    return [short(inner) for inner in value] if isinstance(value, list) else value


@torch.no_grad()
def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    asked = [name for name in sys.argv[2:] if name in SECTIONS] or list(SECTIONS)
    RESULTS["machine"] = machine(DEVICE)
    for name in asked:
        start = time.perf_counter()
        try:
            RESULTS[name] = SECTIONS[name]()
        except Exception:
            RESULTS[name] = {"failed": traceback.format_exc()[-1500:]}
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
        RESULTS[name]["section seconds"] = time.perf_counter() - start
        (out / "session.json").write_text(json.dumps(RESULTS, indent=1, default=str))
        print(f"== {name}: {RESULTS[name]['section seconds']:.1f} s", flush=True)
        for key, value in RESULTS[name].items():
            text = str(short(value))
            print(f"  {key}: {text[: 1500 if key in ('failed', 'profile') else 400]}", flush=True)


if __name__ == "__main__":
    main()
