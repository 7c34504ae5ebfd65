"""Whole clips by the engine's own parts, on the stages of a pipeline."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from diptych.attention import Role, kernels, local
from diptych.engine.components import Components
from diptych.engine.options import Options
from diptych.engine.order import take_batch
from diptych.engine.runner import Runner
from diptych.engine.sharing import alone, sharing_for
from diptych.engine.stages import Stages
from diptych.engine.team import Team
from diptych.memory.precision import EXACT, Precision
from diptych.model.checkpoint import Checkpoint
from diptych.parallel import Layout
from diptych.request import ClipRequest
from diptych.sampling.pipefusion import PipeSettings

CPU = torch.device("cpu")


def approximated(layout_text: str, folder: str, request: ClipRequest, settings: PipeSettings, text: str) -> int:
    """How often this rank attended by an inexact kernel, which stands for that of a GPU, in a clip of a precision."""
    flash = next(kernel for kernel in kernels.KERNELS if kernel.device == "cpu")
    calls = []

    def counted(*args: Any) -> Any:
        calls.append(len(calls))
        return flash.core(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "KERNELS", (replace(flash, name="rough", exact=False, core=counted), *kernels.KERNELS))
        patch.setattr(local, "KERNELS", kernels.KERNELS)
        patch.setattr(Options, "kernels", {Role.VISUAL_SELF: "rough"})
        clip(layout_text, folder, request, settings, "resident", Precision.parse(text))
    return len(calls)


def clip(
    layout_text: str,
    folder: str,
    request: ClipRequest,
    settings: PipeSettings,
    modulation: str,
    precision: Precision = EXACT,
) -> Any:
    """The clip of the first rank, and how many bytes of blocks this rank loaded."""
    layout, checkpoint = Layout.parse(layout_text), Checkpoint.open(folder)
    pipe = settings if layout.pipeline > 1 else None
    options = Options(
        checkpoint,
        layout,
        CPU,
        torch.float32,
        timedelta(seconds=60),
        pipe=pipe,
        modulation=modulation,
        precision=precision,
    )
    rank = dist.get_rank() if layout.world > 1 else 0
    parts = Components.load(options, CPU, first=rank == 0, stage=layout.stage(rank))
    held = sum(p.nbytes for p in parts.transformer.visual_transformer_blocks.parameters())
    if layout.world == 1:
        return Runner(parts, alone()).generate(take_batch([request], checkpoint.defaults), Stages())[0], held
    runner = Runner(parts, sharing_for(layout, CPU, options.kernels, pipe=pipe), rank)
    orders = take_batch([request], checkpoint.defaults)
    made = Team(runner, dist.group.WORLD).generate(orders, Stages(), lambda: False)
    return None if made is None else made[0], held
