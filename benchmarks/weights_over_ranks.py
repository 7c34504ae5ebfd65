"""Weights over the GPUs of one host: memory and seconds of a forward with `shard` and `tensor`, and what they change.

    torchrun --nproc-per-node 2 benchmarks/weights_over_ranks.py OUT.json [--models lite,pro] [--budget 150] [--quick]

Random weights, 864x480, 125 frames, the same on every layout: each is held against `ulysses` over all ranks, whose
weights are whole on every rank. Two ranks need 150 seconds on H200s. OUT.json is written anew after every layout.
`--quick` is the same on the CPU with the tiny model: it shows that everything runs, and no speed.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from diptych.attention import APPROXIMATE
from diptych.bench.geometry import Geometry, config_named, random_inputs, random_transformer
from diptych.engine.sharing import sharing_for
from diptych.parallel import Layout
from diptych.parallel.weights import WeightSplit
from diptych.sampling.denoiser import Denoiser
from diptych.sampling.latents import Latents


def layouts(world: int) -> list[tuple[str, Layout]]:
    """What is measured, the reference first."""
    found = [
        ("exact", Layout(ulysses=world)),
        ("exact", Layout(ulysses=world, shard=world)),
        ("exact", Layout(tensor=world)),
        ("fp8", Layout(ulysses=world)),
        ("fp8", Layout(ulysses=world, shard=world)),
    ]
    if world > 2:
        found.insert(3, ("exact", Layout(ulysses=world // 2, tensor=2, shard=world // 2)))
    return found


class Measured:
    """One model on all ranks."""

    def __init__(self, name: str, device: torch.device, quick: bool) -> None:
        self.config = config_named("tiny" if quick else name)
        self.size = Geometry.parse("64x32x9" if quick else "864x480x125")
        self.dtype = torch.float32 if quick else torch.bfloat16
        self.device = device
        self.inputs = random_inputs(self.config, self.size, 9 if quick else 200, device, self.dtype)
        self.reference: dict[str, Latents] = {}

    def layout(self, precision: str, layout: Layout) -> dict[str, Any]:
        """Seconds to make the weights and of two forwards, GiB of the weights and at the peak, and the difference."""
        start = self._start()
        split = WeightSplit.of(layout, self.device.type)
        model = random_transformer(self.config, self.device, self.dtype, split=split, fp8=precision == "fp8")
        made, held = self._end(start), self._held()
        fast = precision == "fp8" and self.device.type == "cuda"
        sharing = sharing_for(layout, self.device, APPROXIMATE if fast else None)
        i, A = self.inputs, self.size.audio_tokens
        grid = model.grid(*self.size.latents, A, tail=False, device=self.device)
        attend, shard = sharing.split(grid.tokens)
        times = []
        with torch.no_grad():
            context = model.context(i.text, i.pooled, None)
            denoiser = Denoiser(model, attend, grid, [context], 1.0, None, shard)
            for _ in range(2):
                start = self._start()
                out = denoiser.lane(i.video, i.audio, i.timestep.cpu()[0], context)
                times.append(self._end(start))
        reference = self.reference.setdefault(precision, out)
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        return {
            "making s": made,
            "first s": times[0],
            "forward s": times[1],
            "weights GiB": held / 2**30,
            "peak GiB": peak / 2**30,
            "video off by": _relative(out.video, reference.video),
            "sound off by": _relative(out.audio, reference.audio),
        }

    def _start(self) -> float:
        self._wait()
        dist.barrier()
        return time.perf_counter()

    def _end(self, start: float) -> float:
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _held(self) -> int:
        return torch.cuda.memory_allocated() if self.device.type == "cuda" else 0


def _relative(x: Any, reference: Any) -> float:
    return float((x.float() - reference.float()).norm() / reference.float().norm())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--models", default="lite,pro")
    parser.add_argument("--budget", type=float, default=150.0, help="seconds after which no layout is begun")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    began = time.monotonic()
    dist.init_process_group("gloo" if given.quick else "cpu:gloo,cuda:nccl")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cpu") if given.quick else torch.device("cuda", rank)
    if not given.quick:
        torch.cuda.set_device(device)
    results: dict[str, Any] = {"ranks": world, "torch": torch.__version__}
    for name in given.models.split(","):
        measured = Measured(name, device, given.quick)
        for precision, layout in layouts(world):
            late = torch.tensor([time.monotonic() - began > given.budget], dtype=torch.uint8)
            dist.broadcast(late, src=0)
            if late.item():
                continue
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            try:
                row = measured.layout(precision, layout)
            except torch.cuda.OutOfMemoryError:
                row = {"failed": traceback.format_exc()[-500:]}
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()
            results[f"{name}, {precision}, {layout}"] = row
            if rank == 0:
                given.out.write_text(json.dumps(results, indent=1))
    if rank == 0:
        for label, row in results.items():
            if isinstance(row, dict):
                print(f"{label:42}", "  ".join(f"{key} {value:.4g}" for key, value in row.items() if key != "failed"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
