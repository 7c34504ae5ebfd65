"""What the sections of offload_run share: sizes, caps on the allocator, measuring, and host memory locked once."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from diptych.bench.geometry import Geometry
from diptych.bench.timing import once
from diptych.memory.allocator import grow_segments
from diptych.memory.footprint import GIB, RELEASED, Parts
from diptych.memory.host import host_bytes

QUICK = "--quick" in sys.argv
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
SIZE = Geometry.parse("96x64x9" if QUICK else "864x480x125")
TEXT = 9 if QUICK else 200
START = time.perf_counter()
grow_segments(DEVICE)  # as an engine with a limit does
PARTS = Parts(language=0, language_layer=0, language_layers=0, clip=0, vae=0, sound=0) if QUICK else RELEASED


def sync() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def tidy() -> None:
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def cap(gib: float | None) -> None:
    """Let torch's allocator have so much and no more; None: all."""
    if DEVICE.type != "cuda":
        return
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction(1.0 if gib is None else gib * GIB / total)


def measured(call: Callable[[], Any], repeats: int = 1) -> dict[str, Any]:
    """One call that may still bring weights in, then `repeats` timed ones; peaks over all of them."""
    if DEVICE.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    call()
    sync()
    first = time.perf_counter() - start
    times = [once(call, DEVICE) for _ in range(repeats)]
    sync()
    told = {"first": first, "seconds": min(times, default=first)}
    if DEVICE.type == "cuda":
        told["allocated GiB"] = torch.cuda.max_memory_allocated() / GIB
        told["reserved GiB"] = torch.cuda.max_memory_reserved() / GIB
    return told


def resident_memory() -> float:
    """GiB of this process in host memory."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024 / GIB


class Host:
    """Host memory for all settings, locked once; its size and the time that took."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.told: dict[str, float] = {}

    def of(self, nbytes: int) -> torch.Tensor:
        if nbytes > self.memory.numel():
            self.memory = torch.empty(0, dtype=torch.uint8)
            gc.collect()
            before, start = resident_memory(), time.perf_counter()
            self.memory = host_bytes(nbytes, page_locked=DEVICE.type == "cuda")
            seconds = time.perf_counter() - start
            self.told = {
                "GiB": nbytes / GIB,
                "seconds": seconds,
                "GiB a second": nbytes / GIB / seconds,
                "resident GiB more": resident_memory() - before,
                "page-locked": float(self.memory.is_pinned()) if DEVICE.type == "cuda" else 0.0,
            }
        return self.memory[:nbytes]


HOST = Host()
