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
from diptych.bench.timing import alternating, median, peak_memory, seconds
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


def decode() -> dict[str, Any]:
    """One window of the video VAE: ours and diffusers', fp16."""
    from diffusers import AutoencoderKLHunyuanVideo

    from diptych.codecs.vae_fast import FastDecoder

    widths = {"block_out_channels": (16, 16, 32, 32), "norm_num_groups": 4, "layers_per_block": 1} if TINY else {}
    torch.manual_seed(0)
    half = torch.float32 if TINY else torch.float16
    vae = AutoencoderKLHunyuanVideo(**widths).to(DEVICE, half).eval().requires_grad_(False)
    latents = randn(1, 16, *((2, 1, 2) if TINY else (5, 60, 108)), dtype=half)
    fast = FastDecoder(vae.decoder)
    with torch.no_grad():
        calls: dict[str, Callable[[], Any]] = {
            "diptych": lambda: fast(latents),
            "diffusers": lambda: vae.decoder(latents),
        }
        times = alternating(calls, DEVICE, 2)
        return {
            "seconds": {name: min(values) for name, values in times.items()},
            "peak GiB": {name: peak_memory(call, DEVICE) / 2**30 for name, call in calls.items()},
            "difference": relative(calls["diptych"](), calls["diffusers"]()),
            "profile": profile.by_class(calls["diptych"], DEVICE, top=20),
        }


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
    "fused": fused,
    "cross": cross,
    "pro": lambda: forwards("tiny" if TINY else "pro", 2),
    "lite": lambda: forwards("tiny" if TINY else "lite", 3),
    "decode": decode,
    "exactness": exactness,
    "compiled": compiled,
}


def short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: short(inner) for key, inner in value.items()}
    return [short(inner) for inner in value] if isinstance(value, list) else value


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
