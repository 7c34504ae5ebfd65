"""What each rank of `multi_gpu.py` does: sections, one after the other, whose results the first rank writes.

Started by `multi_gpu.py`, never by hand. What fails ends the process, with its traceback in a file; the launcher then
goes on with the sections after it in new processes.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import multi_gpu_links
import multi_gpu_models

MODELS = ("pro", "lite", "pro-distill")


@dataclass
class Bench:
    """This rank, and what it has measured. group: gloo, for agreements; None on a rank alone.

    folder: where ranks and worlds leave files for each other; until: when to have ended, monotonic seconds;
    made: what is kept from section to section.
    """

    rank: int
    world: int
    device: torch.device
    group: dist.ProcessGroup | None
    quick: bool
    folder: Path
    until: float
    worlds: tuple[int, ...] = ()
    results: dict[str, Any] = field(default_factory=dict)
    section: str = ""
    made: dict[Any, Any] = field(default_factory=dict)

    def note(self, name: str, value: Any) -> None:
        """Keep a result of the present section, at once also in the file."""
        self.results.setdefault(self.section, {})[name] = value
        if self.rank == 0:
            file = self.folder / f"world-{self.world}.json"
            file.with_suffix(".new").write_text(json.dumps(self.results, default=str))
            file.with_suffix(".new").rename(file)

    def most(self, value: float) -> float:
        """The largest of all ranks' values."""
        if self.group is None:
            return value
        box = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(box, dist.ReduceOp.MAX, group=self.group)
        return float(box)

    def wall(self, call: Callable[[], Any]) -> float:
        """Seconds from when all ranks begin until the slowest has ended."""
        self.wait()
        self.most(0.0)
        start = time.perf_counter()
        call()
        self.wait()
        return self.most(time.perf_counter() - start)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's value, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value, group=self.group)
        return values

    def room(self, name: str, seconds: float) -> bool:
        """Whether `seconds` more are left, by the first rank's clock; what is left out is noted under `name`."""
        left = -self.most(-(self.until - time.monotonic() if self.rank == 0 else float("inf")))
        if self.quick or left > seconds:
            return True
        self.note(name, {"skipped": f"{left:.0f} s left, about {seconds:.0f} needed"})
        return False

    def free(self) -> None:
        if self.device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)


def sections(models: tuple[str, ...]) -> dict[str, Callable[[Bench], None]]:
    """By name, in the order in which they run."""
    found: dict[str, Callable[[Bench], None]] = {"links": multi_gpu_links.links}
    for model in models:
        found[model] = lambda bench, model=model: multi_gpu_models.forwards(bench, model)  # type: ignore[misc]
    found["decode"] = multi_gpu_models.decode
    return found


@torch.no_grad()
def run(bench: Bench, names: list[str], models: tuple[str, ...]) -> dict[str, Any]:
    """The sections called `names`; on every rank alike."""
    known = sections(models)
    for name in names:
        bench.section = name
        bench.note("state", "running")
        start = time.perf_counter()
        known[name](bench)
        bench.free()
        bench.note("state", "done")
        bench.note("section seconds", time.perf_counter() - start)
    return bench.results


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("folder", type=Path)
    options.add_argument("--sections", required=True)
    options.add_argument("--models", default=",".join(MODELS))
    options.add_argument("--seconds", type=float, required=True)
    options.add_argument("--worlds", default="")
    options.add_argument("--quick", action="store_true")
    given = options.parse_args()
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    until = time.monotonic() + given.seconds
    cuda = torch.cuda.is_available() and not given.quick
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    try:
        group = None
        if world > 1:
            dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
            group = dist.new_group(backend="gloo")
        worlds = tuple(int(text) for text in given.worlds.split(",") if text)
        bench = Bench(rank, world, device, group, given.quick, given.folder, until, worlds)
        run(bench, given.sections.split(","), tuple(given.models.split(",")))
    except BaseException:
        (given.folder / f"failed-{world}-{rank}.txt").write_text(traceback.format_exc()[-3000:])
        os._exit(1)  # others may sit in a collective with this rank
    sys.stdout.flush()
    os._exit(0)  # tearing NCCL down has nothing to tell


if __name__ == "__main__":
    main()
