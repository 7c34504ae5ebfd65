"""Sections about what a user waits for: the start, loading, whole clips; and steps that a cache predicts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from safetensors.torch import save_file

from diptych.attention import APPROXIMATE, LocalAttend, Role
from diptych.bench.forward import shortened
from diptych.bench.geometry import Inputs, config_named, random_inputs, random_transformer
from diptych.bench.load import bench_load
from diptych.bench.random_clip import Decoders, decoded, denoised
from diptych.bench.timing import peak_memory
from diptych.engine.lanes import summarise
from diptych.engine.sharing import alone
from diptych.engine.tracing import Tracer
from diptych.memory import fp8
from diptych.model.checkpoint import Checkpoint
from diptych.model.headers import read_header
from diptych.model.inventory import Component
from diptych.model.transformer import TextContext, Transformer
from diptych.sampling.caches.magcache import MagCache, MagCacheSettings, magcache_plan
from h200_common import DEVICE, HALF, OURS, SIZE, TEXT, TINY, free, wait

_DECODERS: list[Decoders] = []


def clip(name: str, precision: str) -> dict[str, Any]:
    """Ten forwards of a distilled model and the decode of picture and sound; text and MP4 are not in it."""
    config = config_named("tiny-distill" if TINY else name)
    model = random_transformer(config, DEVICE, HALF)
    inputs = random_inputs(config, SIZE, TEXT, DEVICE, HALF)
    contexts = [model.context(inputs.text, inputs.pooled, None)]
    kernels = {}
    if precision == "fp8":
        fp8.quantise(model)
        kernels = dict(APPROXIMATE)
    free()
    with shortened(model):
        denoised(model, contexts, SIZE, alone(kernels), device=DEVICE, steps=1)
    if not _DECODERS:
        _DECODERS.append(Decoders.random(DEVICE, small=TINY))
        latents, _ = _denoised(model, contexts, kernels, 1)
        decoded(latents, _DECODERS[0], SIZE)
    out: dict[str, Any] = {"precision": precision}

    def make() -> None:
        start = time.perf_counter()
        latents, out["steps s"] = denoised(model, contexts, SIZE, alone(kernels), device=DEVICE)
        middle = time.perf_counter()
        decoded(latents, _DECODERS[0], SIZE)
        end = time.perf_counter()
        out["denoise s"], out["decode and sound s"], out["clip s"] = middle - start, end - middle, end - start

    out["peak GiB"] = peak_memory(make, DEVICE) / 2**30
    return out


def _denoised(model: Transformer, contexts: list[TextContext], kernels: dict[Role, str], steps: int) -> Any:
    with shortened(model):
        return denoised(model, contexts, SIZE, alone(kernels), device=DEVICE, steps=steps)


def step_cache(model: Transformer, inputs: Inputs) -> dict[str, Any]:
    """Half of six forwards predicted by MagCache: is the time half of what six computed ones take?

    Ratios are forced to 1, so that the longest run of predictions decides alone; one lane of guidance.
    """
    steps = 6
    plan = magcache_plan([[1.0] * steps], MagCacheSettings(max_run=1, retention=1 / (2 * steps)))
    contexts = [model.context(inputs.text, inputs.pooled, None)]
    _denoised(model, contexts, {}, 1)
    computed = denoised(model, contexts, SIZE, alone(), device=DEVICE, steps=1)[1][0]
    cache = MagCache(plan)
    spent = denoised(model, contexts, SIZE, alone(), device=DEVICE, steps=steps, cache=cache)[1]
    share = sum(plan[0]) / steps
    return {
        "plan": "".join("x" if one else "." for one in plan[0]),
        "forward without a cache s": computed,
        "steps s": spent,
        "share computed": share,
        "seconds a step": sum(spent) / steps,
        "time over share": sum(spent) / steps / (share * computed),
    }


def traced(model: Transformer, inputs: Inputs) -> dict[str, Any]:
    """Two forwards traced, with what NVML says of the GPU meanwhile."""
    attend = LocalAttend()
    context = model.context(inputs.text, inputs.pooled, None)
    grid = model.grid(*SIZE.latents, SIZE.audio_tokens, tail=False, device=DEVICE)
    tracer = Tracer(0, DEVICE, model.fused_blocks)
    with tracer:
        for _ in range(2):
            model(inputs.video, inputs.audio, inputs.timestep, context, grid, attend)
            wait()
            tracer.step()
    trace = tracer.trace
    return summarise([trace]) | {
        "steps s": [step.end - step.start for step in trace.steps],
        "NVML samples": [[round(at - trace.steps[0].start, 2), busy, used] for at, busy, used in trace.gpu],
    }


def load() -> dict[str, Any]:
    """A transformer of Lite's size written to disk and read again: from the disk, and from the host's page cache."""
    config = config_named("tiny" if TINY else "lite")
    model = random_transformer(config, DEVICE, HALF)
    weights = {name: x.cpu() for name, x in model.state_dict().items()}
    del model
    free()
    with TemporaryDirectory(prefix="lite-") as name:
        folder = Path(name)
        file = folder / "diffusion_pytorch_model.safetensors"
        start = time.perf_counter()
        save_file(weights, file)
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            written = time.perf_counter() - start
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # the first read is the disk's
        del weights
        part = Component("transformer", folder, "Kandinsky6Transformer3DModel", {}, (file,), read_header(file))
        checkpoint = Checkpoint("random", folder, None, True, {"transformer": part}, config)
        out = bench_load(checkpoint, device=DEVICE, dtype=HALF, repeats=3)
    rates = [rate / 1e9 for rate in out["bytes_per_second"]]
    return {"GB": out["bytes"] / 1e9, "written in": written, "read in": out["seconds"], "GB a second": rates}


PROGRAM = """
import json, sys, time
begun = time.perf_counter()
parts = {"interpreter s": time.time() - float(sys.argv[5])}
def mark(name):
    global begun
    now = time.perf_counter()
    parts[name], begun = now - begun, now
import torch
mark("import torch s")
import diptych.engine.engine
from diptych.attention import LocalAttend
from diptych.bench.forward import forward_call
from diptych.bench.geometry import Geometry, config_named, random_inputs, random_transformer
mark("import diptych s")
device = torch.device(sys.argv[2])
size, config = Geometry.parse(sys.argv[3]), config_named(sys.argv[1])
torch.zeros(1, device=device)
mark("device ready s")
model = random_transformer(config, device, torch.bfloat16)
wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
wait()
mark("weights s")
inputs = random_inputs(config, size, int(sys.argv[4]), device, torch.bfloat16)
call = forward_call(model, inputs, size, LocalAttend())
call()
wait()
mark("first forward s")
call()
wait()
mark("second forward s")
print(json.dumps(parts))
"""


def start() -> dict[str, Any]:
    """A new process, from its start to the end of its first forward, beyond weights and a warm forward.

    Twice, so that the second finds what the first compiled; with `--ours` once, when others have compiled before.
    """
    name = "tiny" if TINY else "lite"
    out: dict[str, Any] = {}
    for turn in ("start",) if OURS else ("first start", "second start"):
        ran = subprocess.run(
            [sys.executable, "-c", PROGRAM, name, str(DEVICE), str(SIZE), str(TEXT), str(time.time())],
            capture_output=True,
            text=True,
            timeout=90,
        )
        if ran.returncode:
            return out | {"failed": ran.stderr[-1500:]}
        parts = json.loads(ran.stdout.splitlines()[-1])
        beyond = sum(parts.values()) - parts["weights s"] - 2 * parts["second forward s"]
        out[turn] = parts | {"beyond weights and a forward s": beyond}
    return out
