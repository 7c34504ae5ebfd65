"""What a rank of the pool does for test_cache_ranks: the engine's own parts, inside the pool's process group."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from diptych.engine.components import Components
from diptych.engine.options import Options
from diptych.engine.order import take_batch
from diptych.engine.runner import Runner
from diptych.engine.sharing import sharing_for
from diptych.engine.stages import Stages
from diptych.model.checkpoint import Checkpoint
from diptych.parallel import Layout
from diptych.parallel.agreement import Agreement
from diptych.parallel.weights import WeightSplit
from diptych.request import ClipRequest
from diptych.sampling.caches import CachePlan

CPU = torch.device("cpu")
SIZE = {"width": 48, "height": 32, "frames": 5, "steps": 10, "seed": 7}
CACHES = {
    "magcache": "magcache:0.2,2,0.2",
    "navicache": "navicache:0.6,align=3",
    "firstblock": "firstblock:0.45,2,0.2",
    "cachedit": "cachedit:0.45,2,0.2",
    "taylor": "taylor:2,2,0.2",
    "teacache": "teacache:0.9,3,0.2",
}
"""Daring enough that each of them predicts some steps of the tiny model and computes others."""


@cache
def components(folder: str, split: WeightSplit = WeightSplit()) -> Components:  # noqa: B008 - frozen
    options = Options(Checkpoint.open(folder), Layout(), CPU, torch.float32, timedelta(seconds=60))
    return Components.load(options, CPU, first=True, split=split)


def cached(layout: str | None, folder: str, jobs: list[tuple[ClipRequest, CachePlan]]) -> list[dict[str, Any]]:
    """For each request: final latents and what this rank's cache reports, one after the other on the same runner."""
    if layout is None:
        runner = Runner(components(folder))
    else:
        parsed = Layout.parse(layout)
        runner = Runner(components(folder, WeightSplit.of(parsed, "cpu")), sharing_for(parsed, CPU))
    results = []
    for request, plan in jobs:
        job, _ = runner.prepare(take_batch([request], components(folder).options.checkpoint.defaults, plan), Stages())
        result = runner.denoise(job, Stages())
        video, audio = result.latents
        latents = [video.numpy()] + ([] if audio is None else [audio.numpy()])
        results.append({"latents": latents, "cached": result.cached})
    return results


@dataclass(frozen=True)
class Overheard(Agreement):
    """Keeps what this rank itself says."""

    said: list[list[float]] = field(default_factory=list)

    def total(self, values):
        self.said.append(list(values))
        return super().total(values)


def first_block(folder: str, layout: str, request: ClipRequest, plan: CachePlan) -> dict[str, Any]:
    """What this rank's own tokens say of each decision, and what was decided."""
    sharing = sharing_for(Layout.parse(layout), CPU)
    overheard = Overheard(dist.get_rank(), dist.get_world_size())
    runner = Runner(components(folder), replace(sharing, agreement=overheard))
    job, _ = runner.prepare(take_batch([request], components(folder).options.checkpoint.defaults, plan), Stages())
    result = runner.denoise(job, Stages())
    return {"local": [said[0] / said[1] for said in overheard.said if said[1]], "cached": result.cached}
