"""What a rank does in the tests of split weights: loads its part as an engine's rank does, and computes velocities."""

from __future__ import annotations

import ctypes
import gc
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor

from diptych.attention import LocalAttend, exponents
from diptych.bench.geometry import Geometry, random_inputs
from diptych.engine.components import Components
from diptych.engine.options import Options, pick_pipefusion
from diptych.engine.order import take_batch
from diptych.engine.runner import Job, Runner
from diptych.engine.sharing import alone, sharing_for
from diptych.engine.stages import Stages
from diptych.memory.tables import ModulationTables
from diptych.model import layers, loading
from diptych.model.checkpoint import Checkpoint
from diptych.parallel import Layout
from diptych.parallel.weights import WeightSplit
from diptych.request import ClipRequest

CPU = torch.device("cpu")
TIMES = (900.0, 400.0)
SMALL = Geometry.parse("32x32x5")


def options(folder: str, layout: Layout, **more: Any) -> Options:
    pipe = pick_pipefusion(None, layout)
    return Options(Checkpoint.open(folder), layout, CPU, torch.float32, timedelta(seconds=60), pipe=pipe, **more)


def jobs(folder: str, requests: list[ClipRequest]) -> list[Job]:
    """What the first rank would send for each request."""
    parts = Components.load(options(folder, Layout()), CPU, first=True)
    defaults = parts.options.checkpoint.defaults
    return [Runner(parts).prepare(take_batch([request], defaults), Stages())[0] for request in requests]


def load(folder: str, layout: Layout, rank: int, **more: Any) -> Components:
    split = WeightSplit.of(layout, "cpu") if layout.world > 1 else WeightSplit()
    settled = options(folder, layout, **more)
    return Components.load(settled, CPU, first=False, stage=layout.stage(rank), split=split)


def velocities(
    folder: str, text: str, ready_jobs: list[Job], more: dict[str, Any] | None = None
) -> list[list[np.ndarray | None]]:
    """Video and audio velocities of each job at two times, one after the other."""
    layout, rank = Layout.parse(text), torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    parts = load(folder, layout, rank, **(more or {}))
    sharing = alone() if layout.world == 1 else sharing_for(layout, CPU, pipe=parts.options.pipe)
    runner, made = Runner(parts, sharing, rank), []
    for ready in ready_jobs:
        denoiser = runner.denoiser(ready)
        if parts.options.modulation == "tables":
            denoiser.tables = ModulationTables(
                parts.transformer, torch.tensor(TIMES), denoiser.contexts, audio=ready.resolved.A > 0
            )
        with torch.no_grad():
            for time in TIMES:
                made.append([x if x is None else x.numpy() for x in denoiser.velocity(ready.noise, torch.tensor(time))])
    return made


def bounded_velocities(folder: str, text: str, ready_jobs: list[Job]) -> tuple[list[list[np.ndarray | None]], int]:
    """`velocities` as on a Hopper GPU, where queries carry the scale and a bound of scores is told; and how many bounds
    were computed for it."""
    computed = []

    def counted(*weights: torch.Tensor) -> float:
        computed.append(exponents.bound(*weights))
        return computed[-1]

    counting = SimpleNamespace(bound=counted, factor=exponents.factor)
    with patch.object(layers, "bounds_pay", lambda *_: True), patch.object(layers, "exponents", counting):
        return velocities(folder, text, ready_jobs), len(computed)


def memory(folder: str, text: str) -> dict[str, int]:
    """Bytes: what this rank read and keeps of the transformer, its largest piece, the peak of loading above what was
    before, and what all weights take while a block runs in the middle of a forward."""
    layout, read = Layout.parse(text), []
    original = loading._read

    def counted(file: Any, stored: Any, out: torch.Tensor, start: int) -> None:
        if stored.file.parent.name == "transformer":
            read.append(out.numel())
        original(file, stored, out, start)

    rank = torch.distributed.get_rank()
    before_first = load(folder, layout, rank)  # touches code pages and thread pools that are no part of a load
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests left free would be taken again, uncounted
    torch.distributed.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = high_water()
    loading._read = counted
    try:
        parts = load(folder, layout, rank)
    finally:
        loading._read = original
    loaded, model = high_water(), parts.transformer
    del before_first
    inputs = random_inputs(model.config, SMALL, 5, CPU, torch.float32)
    running: list[int] = []
    model.fused_blocks[6].register_forward_hook(lambda *_: running.append(matrices()))
    with torch.no_grad():
        context = model.context(inputs.text, inputs.pooled, None)
        grid = model.grid(*SMALL.latents, SMALL.audio_tokens, tail=False, device=CPU)
        model(inputs.video, inputs.audio, inputs.timestep, context, grid, LocalAttend())
    pieces = [_piece(p) for p in (*model.parameters(), *parts.vae.parameters())]
    return {
        "read": sum(read),
        "kept": sum(piece.nbytes for piece in pieces),
        "largest": max(piece.nbytes for piece in pieces),
        "of transformer": sum(_piece(p).nbytes for p in model.parameters()),
        "loading": loaded - before,
        "running": running[0],
    }


def matrices() -> int:
    """Bytes of everything alive that may be a weight matrix: two dimensions, and not small."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if type(x) in (torch.Tensor, torch.nn.Parameter) and x.ndim in (1, 2)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors if x.numel() > 10_000}
    return sum(storages.values())


def _piece(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def high_water() -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def groups(text: str) -> tuple[list[int], list[int], tuple[int, ...], list[int]]:
    """Ranks of this rank's tensor and spread groups, the lanes of the latter, and the ranks of its shard mesh."""
    split = WeightSplit.of(Layout.parse(text), "cpu")
    ranks_of = torch.distributed.get_process_group_ranks
    named = [[] if g.size == 1 else ranks_of(_resolve_process_group(g.name)) for g in (split.tensor, split.spread)]
    return *named, split.lanes, [] if split.shard is None else split.shard.mesh.tolist()


def latents(folder: str, text: str, ready: Job, more: dict[str, Any]) -> np.ndarray:
    """The finished video latents of a job, as this rank has them."""
    layout = Layout.parse(text)
    parts = load(folder, layout, torch.distributed.get_rank() if layout.world > 1 else 0, **more)
    runner = Runner(parts, alone() if layout.world == 1 else sharing_for(layout, CPU))
    parts.placement.prepare(ready.resolved, 1, tail=False, cache=None)
    return runner.denoise(ready, Stages()).latents.video.numpy()
