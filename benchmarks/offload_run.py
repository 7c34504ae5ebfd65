"""Offload on one GPU: what each setting takes under a cap of the allocator, and what it costs beside resident weights.

    python benchmarks/offload_run.py OUT.json [--sections engine,lite,text,decode,pro,fp8] [--seconds 240] [--brief]
        [--quick]

Random weights at the released sizes, 864x480, 125 frames (`--quick`: toy sizes, on any device). Each setting is planned
by `diptych.memory.budget` for its cap, the cap is put on torch's allocator, and two forwards run: the first brings the
weights in, the second is timed. Outputs are compared with those of resident weights, bit by bit. About 200 s on an
H200; needs 60 GB of host memory, which all settings share. Results are written after every section. `--brief` measures
no resident modulation and one setting a promise: Pro within 20 and 14.5 GiB, fp8 within 32, Lite within 10.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from diptych.attention import APPROXIMATE, Attend, LocalAttend
from diptych.bench.forward import relative
from diptych.bench.geometry import config_named, random_inputs, random_transformer
from diptych.bench.random_clip import Decoders
from diptych.codecs.tiles import decode_peak, plan_tiles
from diptych.codecs.vae_fast import FastDecoder
from diptych.codecs.video import decode_cost, decode_video
from diptych.memory import fp8
from diptych.memory.budget import Plan, Planner
from diptych.memory.footprint import GIB, Setting, Size, transformer_weights
from diptych.memory.offload import Offloaded
from diptych.memory.precision import EXACT, FP8
from diptych.memory.tables import modulation_layers, park
from diptych.model.transformer import Transformer
from offload_common import DEVICE, DTYPE, HOST, PARTS, QUICK, SIZE, START, TEXT, cap, measured, tidy

BRIEF = "--brief" in sys.argv
PROMISED = ("block, 20 GiB", "block, 14.5 GiB, 8 chunks", "block, 32 GiB", "model, 10 GiB")


class Bench:
    """One transformer with random weights, and one forward of it with modulations computed before."""

    def __init__(self, name: str, attend: Attend | None = None) -> None:
        self.config = config_named("tiny" if QUICK else name)
        self.model: Transformer = random_transformer(self.config, DEVICE, DTYPE)
        self.attend = attend or LocalAttend()
        inputs = self.inputs = random_inputs(self.config, SIZE, TEXT, DEVICE, DTYPE)
        with torch.no_grad():
            self.context = self.model.context(inputs.text, inputs.pooled, None)
            self.modulations = self.model.modulations(inputs.timestep, self.context, audio=True)
        self.grid = self.model.grid(*SIZE.latents, SIZE.audio_tokens, tail=False, device=DEVICE)
        T, Y, X = SIZE.latents
        self.size = Size(T=T, Y=Y, X=X, A=SIZE.audio_tokens, L=TEXT)
        self.out: tuple[torch.Tensor, ...] = ()

    @torch.no_grad()
    def forward(self) -> None:
        self.out = ()
        m = self.model
        streams = m.embed(self.inputs.video, self.inputs.audio, self.context, self.grid, self.modulations, self.attend)
        self.out = m.head(m.blocks(streams, self.attend, own=True))  # type: ignore[assignment]

    def setting(self, **changes: Any) -> Setting:
        base = Setting(itemsize=DTYPE.itemsize, modulation="tables", fused=DEVICE.type == "cuda")
        return replace(base, **changes)

    def plan(self, gib: float, setting: Setting) -> Plan:
        planner = Planner(self.config, PARTS)
        plan = planner.plan(self.size, setting, lambda budget: 0, int(gib * GIB))
        assert plan is not None, f"no plan within {gib} GiB"
        return plan

    def rows(self, chunks: int) -> None:
        for block in self.model.fused_blocks:
            block.video_dec_block.feed_forward.rows = None if chunks == 1 else -(-self.size.tokens // chunks)

    def offloaded(self) -> tuple[Offloaded, float]:
        """The model's weights, moved to the host memory that all settings share, and the seconds that took."""
        layers = self.model.fused_blocks
        kept = list(modulation_layers(self.model))
        elsewhere = {id(p) for layer in kept for p in layer.parameters()}
        here = [p for p in (*self.model.parameters(), *self.model.buffers()) if id(p) not in elsewhere]
        HOST.of(sum(p.numel() * p.element_size() + 256 for p in here))
        start = time.perf_counter()
        moved = Offloaded(self.model, DEVICE, layers, leave_out=kept, host=HOST.memory)
        return moved, time.perf_counter() - start

    def under(self, gib: float, moved: Offloaded, setting: Setting, want: Any, repeats: int = 1) -> dict[str, Any]:
        """One setting under its cap."""
        plan = self.plan(gib, setting)
        chosen = plan.setting
        self.rows(chosen.chunks)
        moved.drop()
        self.out = ()
        tidy()
        cap(gib)
        resident = chosen.resident if chosen.offload == "block" else None
        fetched = moved.fetched
        try:

            def call() -> None:
                moved.load(resident)
                self.forward()

            told = measured(call, repeats)
        finally:
            cap(None)
            self.rows(1)
        told |= {
            "cap GiB": gib,
            "predicted GiB": plan.footprint.phases["denoise"].peak / GIB,
            "resident blocks": len(self.model.fused_blocks) if resident is None else resident,
            "chunks": chosen.chunks,
            "fetched GiB": (moved.fetched - fetched) / GIB,
            "equal": [torch.equal(a, b) for a, b in zip(self.out, want, strict=True)],
            "difference": [relative(a, b) for a, b in zip(self.out, want, strict=True)],
        }
        moved.drop()
        return told


def transformer(name: str, caps: dict[str, tuple[float, dict[str, Any]]], quantised: bool) -> dict[str, Any]:
    """Resident, then every setting of `caps`: label to cap in GiB and changes of the setting."""
    attend = LocalAttend(APPROXIMATE) if quantised and not QUICK else None
    bench = Bench(name, attend)
    result: dict[str, Any] = {}
    if not quantised and not BRIEF:
        told = measured(bench.forward)
        weights = transformer_weights(bench.config, bench.setting(modulation="resident"))
        told["predicted weights GiB"] = weights.total / GIB
        result["resident, with modulation (model offload)"] = told
    start = time.perf_counter()
    park(bench.model)
    result["modulation parked in"] = time.perf_counter() - start
    if quantised:
        fp8.quantise(bench.model)
    tidy()
    result["resident"] = measured(bench.forward, 1 if BRIEF else 2)
    want = tuple(x.clone() for x in bench.out)
    moved, seconds = bench.offloaded()
    precision = FP8 if quantised else EXACT
    weights = transformer_weights(bench.config, bench.setting(precision=precision))
    result["host"] = {
        "moved in": seconds,
        "GiB": moved.host_bytes / GIB,
        "predicted GiB": (weights.total - weights.modulation) / GIB,
        **{f"locking: {key}": value for key, value in HOST.told.items()},
    }
    for label, (gib, changes) in caps.items():
        if BRIEF and label not in PROMISED:
            continue
        if time.perf_counter() - START > LIMIT:
            result[label] = "left out: no time"
            continue
        try:
            result[label] = bench.under(gib, moved, bench.setting(precision=precision, **changes), want)
            result[label]["over resident"] = result[label]["seconds"] / result["resident"]["seconds"]
        except (torch.OutOfMemoryError, AssertionError) as error:
            result[label] = f"{type(error).__name__}: {error}"
            moved.drop()
    return result


def text() -> dict[str, Any]:
    """The language model of the released size, layer by layer under a cap of 10 GiB and whole."""
    from transformers import Qwen2_5_VLTextConfig, Qwen2_5_VLTextModel

    sizes = {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    if QUICK:
        sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4}
    config = Qwen2_5_VLTextConfig(
        **sizes,
        num_key_value_heads=4,
        vocab_size=64 if QUICK else 152_064,
        rope_parameters={
            "rope_type": "default",
            "mrope_section": [1, 2, 3] if QUICK else [16, 24, 24],
            "rope_theta": 1e6,
        },
    )
    torch.manual_seed(0)
    with torch.device(DEVICE):
        before = torch.get_default_dtype()
        torch.set_default_dtype(DTYPE)
        model = Qwen2_5_VLTextModel(config).eval().requires_grad_(False)
        torch.set_default_dtype(before)
    ids = torch.arange(TEXT + 129, device=DEVICE)[None] % config.vocab_size
    out: list[torch.Tensor] = []

    def call() -> None:
        with torch.no_grad():
            out[:] = [model(input_ids=ids, use_cache=False).last_hidden_state]

    result: dict[str, Any] = {"resident": measured(call)}
    want = out[0]
    HOST.of(sum(p.numel() * p.element_size() + 256 for p in (*model.parameters(), *model.buffers())))
    moved = Offloaded(model, DEVICE, list(model.layers), host=HOST.memory)
    for label, resident, gib in (("layer by layer", 0, 10.0), ("whole", None, 14.5)):
        moved.drop()
        tidy()
        cap(gib)

        def visit(resident: int | None = resident) -> None:
            moved.load(resident)
            call()
            moved.drop()

        result[label] = measured(visit) | {"cap GiB": gib, "equal": torch.equal(out[0], want)}
        cap(None)
    return result


def decode() -> dict[str, Any]:
    """The video VAE under the caps that the denoiser has."""
    vae = Decoders.random(DEVICE, small=QUICK).vae
    T, Y, X = SIZE.latents
    latents = torch.randn(1, 16, T, Y, X, device=DEVICE)
    cost = decode_cost(vae)
    moved = Offloaded(vae, DEVICE, on_drop=vae.decoder.release if isinstance(vae.decoder, FastDecoder) else None)
    result: dict[str, Any] = {}
    for gib in (14.5, 10.0, 6.5):
        budget = int(gib * GIB * 0.97)
        plan = plan_tiles(T, Y, X, budget, cost)
        tidy()
        cap(gib)

        def call(plan: Any = plan) -> None:
            moved.load()
            decode_video(vae, latents, plan)

        result[f"within {gib} GiB"] = measured(call) | {
            "tiles": len(plan.tiles),
            "predicted GiB": decode_peak(T, Y, X, budget, cost) / GIB,
        }
        moved.drop()
        cap(None)
    return result


def engine() -> dict[str, Any]:
    """Whole clips of the tiny checkpoint in an engine: every mode beside none, to the bit."""
    from tempfile import TemporaryDirectory

    from diptych import ClipRequest, Engine
    from diptych.model.tiny import write_tiny

    request = ClipRequest("a red circle", width=256, height=192, frames=17, steps=3, seed=7)
    modes: dict[str, dict[str, Any]] = {
        "none": {},  # the first: the others are held against it
        "model": {"offload": "model"},
        "model, tables": {"offload": "model", "modulation": "tables"},
        "block": {"offload": "block"},
        "block, 2 GiB": {"offload": "block", "memory": "2GiB"},
    }
    result: dict[str, Any] = {}
    want: list[Any] = []
    with TemporaryDirectory() as folder:
        checkpoint = write_tiny(Path(folder) / "tiny")
        for name, options in modes.items():
            with Engine.load(checkpoint, device=str(DEVICE), **options) as made:
                clips = [made.generate(request) for _ in range(2)]
            assert clips[0] is not None and clips[1] is not None
            want = want or clips
            result[name] = {
                "seconds": sum(clips[1].report["seconds"].values()),
                "equal": [
                    bool((a.frames == b.frames).all() and (a.audio == b.audio).all())
                    for a, b in zip(clips, want, strict=True)
                ],
                "memory": clips[1].report["memory"],
            }
        if DEVICE.type == "cuda":
            result["out of memory"] = out_of_memory(checkpoint, request, want[0])
    return result


def out_of_memory(checkpoint: Path, request: Any, want: Any) -> dict[str, Any]:
    """What is said of a clip too large for a capped allocator, and whether the next clip is what it should be."""
    from diptych import Engine
    from diptych.errors import DeviceMemoryError

    told = "nothing"
    with Engine.load(checkpoint, device=str(DEVICE)) as made:
        made.generate(request)
        tidy()
        cap((torch.cuda.memory_reserved() + (96 << 20)) / GIB)
        try:
            made.generate(replace(request, width=1280, height=704, frames=61))
        except DeviceMemoryError as error:
            told = str(error)
        finally:
            cap(None)
        clip = made.generate(request)
    return {"told": told, "equal": [bool((clip.frames == want.frames).all())] if clip is not None else None}


SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "engine": engine,
    "lite": lambda: transformer(
        "lite", {"model, 10 GiB": (10.0, {"offload": "model"}), "block, 4 GiB": (4.0, {"offload": "block"})}, False
    ),
    "text": text,
    "decode": decode,
    "pro": lambda: transformer(
        "pro",
        {
            "block, 20 GiB": (20.0, {"offload": "block"}),
            "block, 14.5 GiB": (14.5, {"offload": "block"}),
            "block, 14.5 GiB, 8 chunks": (14.5, {"offload": "block", "chunks": 8}),
            "model, 72 GiB": (72.0, {"offload": "model"}),
            "block, 6.5 GiB": (6.5, {"offload": "block"}),
        },
        False,
    ),
    "fp8": lambda: transformer(
        "pro",
        {
            "block, 34 GiB": (34.0, {"offload": "block"}),
            "block, 32 GiB": (32.0, {"offload": "block"}),
            "block, 14.5 GiB": (14.5, {"offload": "block"}),
        },
        True,
    ),
}


def main() -> None:
    out = Path(sys.argv[1])
    chosen = list(SECTIONS)
    if "--sections" in sys.argv:
        chosen = sys.argv[sys.argv.index("--sections") + 1].split(",")
    results: dict[str, Any] = {"geometry": str(SIZE), "torch": torch.__version__}
    if "pro" in chosen:  # the largest first, so that host memory is locked once
        config = config_named("tiny" if QUICK else "pro")
        weights = transformer_weights(config, Setting(itemsize=DTYPE.itemsize))
        HOST.of(weights.total - weights.modulation + (64 << 20))
    results["host"] = dict(HOST.told)
    for name in chosen:
        start = time.perf_counter()
        if start - START > LIMIT:
            results[name] = "left out: no time"
        else:
            try:
                results[name] = SECTIONS[name]()
            except Exception as error:
                results[name] = f"{type(error).__name__}: {error}"
                cap(None)
        results[f"{name} took"] = time.perf_counter() - start
        out.write_text(json.dumps(results, indent=1))
        tidy()
    show(results, chosen)


def show(results: dict[str, Any], chosen: list[str]) -> None:
    print(f"\n{SIZE}, {DEVICE}; host memory: " + json.dumps(results["host"]))
    columns = ("cap GiB", "predicted GiB", "allocated GiB", "reserved GiB", "first", "seconds", "over resident")
    print(f"{'':38}" + "".join(f"{name.removesuffix(' GiB'):>15}" for name in columns) + "  blocks chunks equal")
    for name in chosen:
        told = results[name]
        if isinstance(told, str):
            print(f"{name}: {told}")
            continue
        for label, row in told.items():
            if not isinstance(row, dict) or "seconds" not in row:
                print(f"  {name}, {label}: {row}")
                continue
            cells = "".join(f"{row[key]:15.3f}" if key in row else f"{'':15}" for key in columns)
            ends = f"  {row.get('resident blocks', '')!s:>6} {row.get('chunks', row.get('tiles', ''))!s:>6}"
            print(f"{name + ', ' + label:38}{cells}{ends} {row.get('equal', '')}")
    print(f"all: {time.perf_counter() - START:.0f} s")


LIMIT = float(sys.argv[sys.argv.index("--seconds") + 1]) - 25 if "--seconds" in sys.argv else 215.0

if __name__ == "__main__":
    main()
