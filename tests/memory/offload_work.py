"""What a rank of the pool does for test_offload_engine: an engine's own parts, inside the pool's process group."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from diptych.engine.components import Components
from diptych.engine.options import Options
from diptych.engine.order import take_batch
from diptych.engine.placement import settled
from diptych.engine.runner import Runner
from diptych.engine.sharing import sharing_for
from diptych.engine.stages import Stages
from diptych.engine.team import Team
from diptych.model.checkpoint import Checkpoint
from diptych.parallel import Layout
from diptych.parallel.weights import WeightSplit
from diptych.request import ClipRequest

CPU = torch.device("cpu")


def clips(folder: str, layout: str, offloads: list[Any], request: ClipRequest) -> list[Any]:
    """The clip of each offload mode (frames, sound, report) on the first rank, and bytes fetched on every rank."""
    results = []
    plan = Layout.parse(layout)
    for offload in offloads:
        options = Options(Checkpoint.open(folder), plan, CPU, torch.float32, timedelta(seconds=60))
        options = settled(options, offload)
        split = WeightSplit.of(plan, "cpu")
        parts = Components.load(options, CPU, first=dist.get_rank() == 0, split=split)
        team = Team(Runner(parts, sharing_for(plan, CPU), dist.get_rank()), dist.group.WORLD)
        made = team.generate(take_batch([request], parts.options.checkpoint.defaults), Stages(), lambda: False)
        guest = parts.placement.visiting.get("transformer")
        fetched = None if guest is None else guest.fetched
        clip = None if made is None else (np.array(made[0].frames), np.array(made[0].audio), made[0].report)
        results.append((clip, fetched))
    return results
