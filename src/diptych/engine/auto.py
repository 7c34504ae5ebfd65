"""`layout="auto"`: the planner asked about the GPUs that torch sees here."""

from __future__ import annotations

from dataclasses import replace

import torch

from diptych.engine.options import check_room
from diptych.errors import LayoutError
from diptych.model.checkpoint import Checkpoint
from diptych.parallel.layout import Layout
from diptych.planner.auto import auto_layout
from diptych.planner.choices import Limits
from diptych.planner.machine import Gpu
from diptych.planner.task import task_of


def given_layout(layout: str | Layout | None) -> Layout | None:
    """The layout that is meant; None for `auto`. Raises `LayoutError`."""
    if isinstance(layout, str):
        return None if layout.strip() == "auto" else Layout.parse(layout)
    if layout is not None and not isinstance(layout, Layout):
        raise LayoutError(f"layout {layout!r} is not accepted: a text such as cfg=2,ulysses=4, auto, or a Layout.")
    return layout or Layout()


def check_ranks(layout: Layout, device: torch.device, joined: int | None) -> None:
    """Raise `LayoutError` where there is no room for the ranks, or torchrun started another number of them."""
    if joined is None:
        check_room(layout, device, layout.world)
    elif joined != layout.world:
        raise LayoutError(f"layout {layout} has {layout.world} ranks, and torchrun started {joined}; make them agree.")


def chosen_layout(checkpoint: Checkpoint, device: torch.device, joined: int | None, limits: Limits) -> Layout:
    """The layout with which a clip of the checkpoint's own size is done soonest on the GPUs here.

    joined: ranks that torchrun started; they all get work. Raises `LayoutError` when no layout fits.
    """
    if limits.offload is None and limits.budget is None:  # as the engine takes it
        limits = replace(limits, offload="none")
    return auto_layout(task_of(checkpoint), gpus_of(device), limits, world=joined)


def gpus_of(device: torch.device) -> list[Gpu]:
    """The GPUs that ranks on `device` may use: none on a CPU, one where another than the first was asked for."""
    if device.type != "cuda":
        return []
    indices = [device.index] if device.index else range(torch.cuda.device_count())
    found = []
    for index in indices:
        here = torch.cuda.get_device_properties(index)
        found.append(Gpu(here.name, here.total_memory, "", (here.major, here.minor)))
    return found
