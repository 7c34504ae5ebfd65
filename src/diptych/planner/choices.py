"""Every way to run a task on a machine, weighed: whether it fits, how long it takes, and which is best."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import product
from typing import Literal

from diptych.codecs.tiles import decode_peak, fused_cost, plan_tiles, released_cost
from diptych.errors import LayoutError
from diptych.memory.budget import OFFLOADS, Planner, modes
from diptych.memory.footprint import GIB, Footprint, Offload, Setting, TextPrecision, footprint
from diptych.memory.precision import EXACT, FP8, Precision
from diptych.parallel.fit import check_fit
from diptych.parallel.layout import Layout
from diptych.planner.cost import Seconds, clip
from diptych.planner.machine import Machine
from diptych.planner.rates import Rates
from diptych.planner.task import Task
from diptych.request import MAX_TEXT_TOKENS

PRECISIONS = (EXACT, FP8)
MODULATIONS: tuple[Literal["resident", "tables"], ...] = ("resident", "tables")
SAME = 0.02
"""Two ways whose times differ by less than this share are equally fast; the simpler one is taken."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What is fixed by who asks; None leaves it open. budget: bytes on each card, if not all of it.

    text_precision: that of all ways; it is an approximation, so nothing but a wish for it brings it in.
    every: also groups that leave cards idle, and several groups side by side; else all cards work on one clip.
    """

    layout: Layout | None = None
    precision: Precision | None = None
    text_precision: TextPrecision = "exact"
    offload: Offload | None = None
    modulation: Literal["resident", "tables"] | None = None
    budget: int | None = None
    every: bool = True


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way: `replicas` groups of `layout.world` cards, each making clips by itself.

    setting: how a rank runs; first, others: bytes of the first rank and of another one; decode: bytes that decoding may
    take, None for its default plan. seconds: of one clip; total: of all. why: what keeps it from fitting, or None.
    named: whether all that is approximate in it was asked for.
    """

    layout: Layout
    replicas: int
    setting: Setting
    first: Footprint
    others: Footprint
    decode: int | None
    seconds: Seconds
    total: float
    budget: int
    why: str | None = None
    tiled: bool = False
    named: bool = True

    @property
    def fits(self) -> bool:
        return self.why is None

    @property
    def approximate(self) -> tuple[str, ...]:
        """What of it is an approximation, in a few words each."""
        s, told = self.setting, []
        if s.precision.kind != "exact":
            told.append(f"precision {s.precision} rounds products and attention scores to 8 bits")
        if s.text_precision != "exact":
            bits = {"8bit": "8 bits", "nf4": "4 bits"}[s.text_precision]
            told.append(f"text precision {s.text_precision} rounds the language model's weights to {bits}")
        if self.layout.pipeline > 1:
            told.append(f"pipeline={self.layout.pipeline} lets patches see others a step old")
        return tuple(told)

    @property
    def exact(self) -> bool:
        return not self.approximate

    @property
    def cards(self) -> int:
        return self.replicas * self.layout.world

    @property
    def host(self) -> int:
        """Bytes of weights that wait in host memory, all ranks together."""
        others = self.others.host * (self.layout.world - 1)
        return self.replicas * (self.first.host + others)

    @property
    def effort(self) -> tuple[float, ...]:
        """How much is out of the ordinary: less is preferred among equally fast ways."""
        s, lay = self.setting, self.layout
        shared = lay.shard > 1 or lay.tensor > 1 or lay.pipeline > 1
        unusual = 2 * OFFLOADS.index(s.offload) + (s.modulation != "resident") + (s.chunks > 1) + self.tiled + shared
        axes = sum(getattr(lay, axis.name) > 1 for axis in fields(lay))
        return (unusual, self.cards, shared, self.host // GIB, axes, lay.ring)


@dataclass(frozen=True)
class Plan:
    """All ways, each kind the fastest first: those that fit and approximate nothing that was not asked for, those that
    fit and do, and those that do not fit."""

    task: Task
    machine: Machine
    rates: Rates
    choices: tuple[Choice, ...]
    budget: int
    notes: tuple[str, ...] = field(default=())

    @property
    def fitting(self) -> list[Choice]:
        return [choice for choice in self.choices if choice.fits]

    @property
    def best(self) -> Choice | None:
        """The fastest way that fits and approximates only what was asked for; where there is none, the fastest."""
        return next(iter(self.fitting), None)


def plan(task: Task, machine: Machine, limits: Limits | None = None, rates: Rates | None = None) -> Plan:
    """Weigh every way to run `task` on `machine`.

    Raises `LayoutError` for a layout that is fixed and does not fit the model or the machine, `RequestError` for a
    precision that leaves more blocks exact than the model has.
    """
    limits = limits or Limits()
    if limits.precision is not None:
        limits.precision.check(task.config.num_visual_blocks)
    rates = rates or Rates.of(machine.card, machine.link)
    budget = limits.budget or machine.card.usable
    found: list[Choice] = []
    roomy: set[tuple[Layout, Precision]] = set()
    for layout, replicas in _groups(task, machine, limits):
        for choice in _ways(task, machine, limits, rates, budget, layout, replicas, roomy):
            found.append(replace(choice, named=_named(choice, limits)))
            s = choice.setting
            if choice.fits and (s.offload, s.modulation) == ("none", "resident"):
                roomy.add((layout, s.precision))
    return Plan(task, machine, rates, tuple(_ranked(found)), budget)


def _named(choice: Choice, limits: Limits) -> bool:
    unasked = choice.setting.precision.kind != "exact" and limits.precision is None
    return not (unasked or (choice.layout.pipeline > 1 and limits.layout is None))


def layouts_of(world: int, task: Task) -> Iterator[Layout]:
    """Every layout of `world` ranks that has work for each of them."""
    axes = ("cfg", "pipeline", "tensor", "ring", "ulysses")
    for ranks in _factors(world, len(axes)):
        for shard in _divisors(world):
            try:
                layout = Layout(**dict(zip(axes, ranks, strict=True)), shard=shard)
                check_fit(layout, task.config)
            except LayoutError:
                continue
            if layout.cfg == 1 or task.guided:
                yield layout


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _factors(n: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write `n` as a product of so many numbers, in order."""
    if parts == 1:
        yield (n,)
        return
    for first in _divisors(n):
        for rest in _factors(n // first, parts - 1):
            yield (first, *rest)


def _groups(task: Task, machine: Machine, limits: Limits) -> Iterator[tuple[Layout, int]]:
    if limits.layout is not None:
        layout = limits.layout
        check_fit(layout, task.config)
        if layout.world > machine.count:
            raise LayoutError(f"layout {layout} takes {layout.world} GPUs, and {machine} has {machine.count}.")
        yield layout, min(machine.count // layout.world, task.clips) if limits.every else 1
        return
    for world in range(1, machine.count + 1) if limits.every else (machine.count,):
        replicas = max(1, min(machine.count // world, task.clips)) if limits.every else 1
        for layout in layouts_of(world, task):
            yield layout, replicas


def _ways(
    task: Task,
    machine: Machine,
    limits: Limits,
    rates: Rates,
    budget: int,
    layout: Layout,
    replicas: int,
    roomy: set[tuple[Layout, Precision]],
) -> Iterator[Choice]:
    """roomy: with what all weights fit on the card; nothing that moves or borrows them is as fast."""
    precisions = (limits.precision,) if limits.precision else PRECISIONS if machine.card.hopper else (EXACT,)
    modulations = (limits.modulation,) if limits.modulation else MODULATIONS
    offloads = (limits.offload,) if limits.offload else OFFLOADS
    whole = replace(layout, shard=1)
    for precision, offload, modulation in product(precisions, offloads, modulations):
        if (layout, precision) in roomy or (whole, precision) in roomy:
            continue
        if offload == "block" and modulation not in (limits.modulation, "tables"):
            continue  # streamed blocks come without their modulation: tables are what it has
        setting = Setting(
            precision=precision,
            text_precision=limits.text_precision,
            modulation=modulation,
            modulation_itemsize=task.modulation_itemsize,
            fused=rates.fused,
            offload=offload,
            **vars(layout),
        )
        if offload in modes(setting):
            yield _weigh(task, machine, rates, budget, layout, replicas, setting)


def _weigh(
    task: Task, machine: Machine, rates: Rates, budget: int, layout: Layout, replicas: int, setting: Setting
) -> Choice:
    size, config = task.size, task.config
    cost = fused_cost() if rates.fused else released_cost()

    def decode(room: int | None) -> int:
        usual = _decode_peak(size.T, size.Y, size.X, None, cost)
        return usual if room is None or usual <= room else _decode_peak(size.T, size.Y, size.X, room, cost)

    widest = replace(size, L=max(size.L, MAX_TEXT_TOKENS))  # memory is for any prompt, seconds for a usual one
    planner = Planner(config, task.parts)
    placed = planner.plan(widest, setting, decode, budget)
    why = room = None
    if placed is None:
        least = planner.least(widest, setting, decode)
        why = f"needs {least / GIB:.1f} GiB on a card, {budget / GIB:.1f} are there"
        first = footprint(config, widest, setting, decode=decode(None), parts=task.parts)
    else:
        setting, first = placed.setting, placed.footprint
        room = placed.decode if decode(None) > (placed.decode or decode(None)) else None
    others = footprint(config, widest, setting, decode=decode(room), parts=task.parts, first=False)
    tiles = _plan_tiles(size.T, size.Y, size.X, room, cost)
    seconds = clip(config, size, layout, setting, rates, task.parts, tiles)
    rounds = -(-task.clips // replicas)
    choice = Choice(
        layout=layout,
        replicas=replicas,
        setting=setting,
        first=first,
        others=others,
        decode=room,
        seconds=seconds,
        total=rounds * seconds.total,
        budget=budget,
        why=why,
        tiled=room is not None,
    )
    if why is None and machine.host_memory is not None and choice.host > machine.host_memory:
        why = f"needs {choice.host / GIB:.0f} GiB of host memory, {machine.host_memory / GIB:.0f} are there"
        return replace(choice, why=why)
    return choice


_decode_peak = lru_cache(maxsize=512)(decode_peak)  # asked for again with every layout
_plan_tiles = lru_cache(maxsize=64)(plan_tiles)


def _ranked(found: list[Choice]) -> list[Choice]:
    """What fits before what does not, what was asked for before other approximations, fast before slow; of those within
    `SAME` of the fastest among them, simple before not."""
    groups: list[list[Choice]] = []
    for choice in sorted(found, key=lambda choice: (not choice.fits, not choice.named, choice.total)):
        lead = groups[-1][0] if groups else None
        alike = lead is not None and (choice.fits, choice.named) == (lead.fits, lead.named)
        if lead is not None and alike and choice.total <= lead.total * (1 + SAME):
            groups[-1].append(choice)
        else:
            groups.append([choice])
    return [choice for group in groups for choice in sorted(group, key=lambda choice: (choice.effort, choice.total))]
