"""`layout auto`: the layout of the best plan for the GPUs that are there and what else was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from diptych.errors import LayoutError
from diptych.memory.footprint import GIB
from diptych.memory.precision import EXACT
from diptych.parallel.layout import Layout
from diptych.planner.cards import CARDS, Card, card_shown
from diptych.planner.choices import Limits, plan
from diptych.planner.machine import Gpu, Machine
from diptych.planner.task import Task
from diptych.planner.tell import name_of


def card_like(gpus: Sequence[Gpu]) -> Card:
    """The card to plan for: that of the table with the least memory found here.

    Of a card that is not in the table only memory and capability are known; it is taken for an A100 on PCIe, which is
    enough to compare layouts with each other.
    """
    least = min(gpus, key=lambda gpu: gpu.memory)
    known = card_shown(least.name) or replace(CARDS["a100-80"], name=least.name, nvlink=None)
    return replace(known, memory=least.memory / GIB, capability=least.capability)


def auto_layout(task: Task, gpus: Sequence[Gpu], limits: Limits, *, world: int | None = None) -> Layout:
    """The layout with which one clip of `task` is done soonest.

    gpus: those that may be used, none for a CPU. limits: what else is fixed. world: the number of ranks, where others
    have started them; otherwise as many as are worth their while.

    Raises `LayoutError` when no layout fits, saying what would.
    """
    if not gpus:  # ranks on a CPU share its cores: more of them gain nothing
        return Layout() if world in (None, 1) else _for_ranks(task, world)
    machine = Machine(card=card_like(gpus), count=world or len(gpus))
    found = plan(task, machine, replace(limits, layout=None, every=world is None))
    best = next((choice for choice in found.fitting if choice.layout.pipeline == 1), None)
    if best is not None:
        return best.layout
    free = plan(
        task, machine, Limits(budget=limits.budget, text_precision=limits.text_precision, every=world is None)
    ).best
    hint = "not even with --offload block"
    if free:
        hint = f"{name_of(free, bfloat16=machine.card.bfloat16)} fits"
        hint += "" if free.exact else ", which is an approximation"
    closest = min(found.choices, key=lambda choice: choice.first.peak)
    raise LayoutError(f"layout auto finds none for {machine}: {closest.layout} {closest.why}; {hint}.")


def _for_ranks(task: Task, world: int) -> Layout:
    machine = Machine(card=CARDS["h200"], count=world)
    found = plan(task, machine, Limits(precision=EXACT, offload="none", modulation="resident", every=False))
    whole = [choice for choice in found.choices if choice.layout.pipeline == 1]
    return min(whole, key=lambda choice: (choice.total, choice.effort)).layout
