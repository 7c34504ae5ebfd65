"""A plan as a picture: who holds what, how full each card is, and where the seconds go."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from diptych.attention.plan import Span, spans, split
from diptych.errors import MediaError
from diptych.media.files import check_writable, replacing
from diptych.memory.footprint import GIB, Footprint
from diptych.planner.choices import Choice, Plan
from diptych.planner.tell import forward_of, headline, lead, name_of

INK, PAPER, FAINT = "#1d2433", "#ffffff", "#d7dce5"
LANES = ("#2f6f8f", "#b4682c")
"""Conditional pass, and the one without the prompt."""
WEIGHTS, WORK = "#41597f", "#9db4d3"
MOST_CARDS = 16


def save(plan: Plan, choice: Choice, path: Path) -> None:
    """Write the picture of `choice` as a PNG. Raises `MediaError` where that cannot be."""
    from matplotlib.figure import Figure

    check_drawable(path)
    cards = min(choice.cards, MOST_CARDS)
    rows = -(-cards // 4)
    figure = Figure(figsize=(11, 4.6 + 1.35 * rows), facecolor=PAPER, layout="constrained")
    halves: Any = figure.subfigures(2, 1, height_ratios=(1.35 * rows, 3.6))
    top, bottom = halves
    way = f"{lead(plan, choice)}: {name_of(choice, bfloat16=plan.machine.card.bfloat16)}"
    figure.suptitle(f"{headline(plan)}\n{way}", color=INK, fontsize=12)
    _holders(top.subplots(), plan, choice, cards)
    memory, seconds = bottom.subplots(1, 2, width_ratios=(3, 2))
    _memory(memory, plan, choice)
    _seconds(seconds, plan, choice)
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=110, format="png")


def check_drawable(path: Path) -> None:
    """Raise `MediaError` where `save` could not write."""
    check_writable(path)
    if path.suffix.lower() != ".png":
        raise MediaError(f"cannot draw to {path}: give a name that ends with .png.")


class Held(NamedTuple):
    """What a rank works on. lane: 0, or 1 for the pass without the prompt where `cfg=2` splits them; blocks: of its
    pipeline stage; tokens: those that it keeps; heads: of the video self-attention."""

    lane: int
    blocks: Span
    tokens: Span
    heads: Span


def held(plan: Plan, choice: Choice) -> list[Held]:
    """For every rank of one group, in rank order."""
    layout, config = choice.layout, plan.task.config
    tokens = spans(split(plan.task.size.tokens, layout.sequence))
    blocks = spans(split(config.num_visual_blocks, layout.pipeline))
    ranks = []
    for rank in range(layout.world):
        part = spans(split(config.heads, layout.tensor))[rank % layout.tensor]
        place = rank // layout.tensor
        own = spans(split(part.size, layout.ulysses))[place % layout.ulysses]
        heads = Span(part.start + own.start, part.start + own.stop)
        lane = rank // (layout.world // layout.cfg)
        ranks.append(Held(lane, blocks[layout.stage(rank)], tokens[place % layout.sequence], heads))
    return ranks


def _holders(axes: Any, plan: Plan, choice: Choice, cards: int) -> None:
    from matplotlib.patches import FancyBboxPatch

    axes.set_axis_off()
    rows = -(-cards // 4)
    axes.set_xlim(0, 4)
    axes.set_ylim(-rows, 0.05)
    ranks = held(plan, choice)
    for card in range(cards):
        has = ranks[card % choice.layout.world]
        x, y = card % 4, -(card // 4) - 1
        shape = FancyBboxPatch(
            (x + 0.06, y + 0.08),
            0.86,
            0.8,
            boxstyle="round,pad=0.02",
            facecolor=PAPER,
            edgecolor=LANES[has.lane],
            linewidth=2,
        )
        axes.add_patch(shape)
        name = f"card {card}"
        if choice.replicas > 1:
            name += f"  ·  group {card // choice.layout.world}"
        axes.text(x + 0.12, y + 0.74, name, color=LANES[has.lane], weight="bold", va="center", fontsize=9)
        for line, text in enumerate(_lines(plan, choice, card % choice.layout.world, has)):
            axes.text(x + 0.12, y + 0.57 - 0.14 * line, text, color=INK, va="center", fontsize=8)
    if choice.cards > cards:
        axes.text(3.9, -rows, f"and {choice.cards - cards} more cards like these", ha="right", fontsize=8, color=INK)


def _lines(plan: Plan, choice: Choice, rank: int, has: Held) -> list[str]:
    layout, lines = choice.layout, []
    if layout.cfg > 1:
        lines.append("without the prompt" if has.lane else "with the prompt")
    elif plan.task.guided:
        lines.append("both passes, one after the other")
    if layout.pipeline > 1:
        lines.append(f"blocks {has.blocks.start} to {has.blocks.stop - 1}")
    lines.append(f"tokens {has.tokens.start:,} to {has.tokens.stop - 1:,}" if layout.sequence > 1 else "all tokens")
    if layout.ulysses * layout.tensor > 1:
        lines.append(
            f"heads {has.heads.start} to {has.heads.stop - 1} in self-attention" if has.heads.size else "no heads"
        )
    if rank == 0 and len(lines) < 4:
        lines.append("reads the text, makes the sound")
    return lines


def _memory(axes: Any, plan: Plan, choice: Choice) -> None:
    bars: list[tuple[str, Footprint]] = [("first", choice.first)]
    if choice.layout.world > 1:
        bars.append(("others", choice.others))
    names, weights, work = [], [], []
    for who, footprint in bars:
        for phase in ("text", "denoise", "picture", "sound"):
            if phase in footprint.phases:
                names.append(f"{who}: {phase}" if len(bars) > 1 else phase)
                weights.append(footprint.phases[phase].weights / GIB)
                work.append(footprint.phases[phase].work / GIB)
    places = range(len(names))
    axes.barh(places, weights, color=WEIGHTS, label="weights")
    axes.barh(places, work, left=weights, color=WORK, label="everything else")
    axes.axvline(plan.budget / GIB, color=INK, linestyle="--", linewidth=1)
    axes.text(plan.budget / GIB, -0.75, f"{plan.budget / GIB:.1f} GiB", ha="right", va="center", fontsize=8, color=INK)
    axes.set_yticks(list(places), names, fontsize=8)
    axes.invert_yaxis()
    _frame(axes, "GiB on a card")
    axes.legend(fontsize=8, frameon=False, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2)


def _seconds(axes: Any, plan: Plan, choice: Choice) -> None:
    f, s, size = forward_of(plan, choice), choice.seconds, plan.task.size
    forwards = size.steps * size.lanes / choice.layout.cfg
    parts: Sequence[tuple[str, float]] = (
        ("products", f.linear * forwards),
        ("self-attention", f.self_attention * forwards),
        ("small work", (f.other_attention + f.elementwise + f.launches) * forwards),
        ("sending", f.exchange * forwards),
        ("waiting", f.streaming * forwards + s.moving),
        ("text", s.text),
        ("decode", s.decode),
    )
    places = range(len(parts))
    axes.barh(places, [seconds for _, seconds in parts], color=WEIGHTS)
    longest = max(seconds for _, seconds in parts)
    for place, (_, seconds) in enumerate(parts):
        axes.text(seconds + 0.015 * longest, place, f"{seconds:.3g}", va="center", fontsize=8, color=INK)
    axes.set_yticks(list(places), [name for name, _ in parts], fontsize=8)
    axes.set_xlim(0, 1.15 * longest)
    axes.invert_yaxis()
    _frame(axes, f"seconds of one clip: {s.total:.1f} in all")


def _frame(axes: Any, label: str) -> None:
    axes.set_xlabel(label, fontsize=9, color=INK)
    axes.tick_params(colors=INK, labelsize=8)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
