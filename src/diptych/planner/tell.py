"""A plan in words: what is best and why, the ways beside it, and what does not fit; the same as JSON."""

from __future__ import annotations

import shlex
from typing import Any

from diptych.codecs.tiles import fused_cost, plan_tiles, released_cost
from diptych.memory.budget import shown, written
from diptych.memory.footprint import GIB
from diptych.memory.precision import Precision
from diptych.planner.choices import SAME, Choice, Plan
from diptych.planner.cost import Forward, forward
from diptych.planner.options import pick_bytes


def forward_of(plan: Plan, choice: Choice) -> Forward:
    """Seconds of one forward of `choice`."""
    return forward(plan.task.config, plan.task.size, choice.setting, plan.rates)


def headline(plan: Plan) -> str:
    t, r = plan.task, plan.task.geometry
    sound = "with sound" if t.size.A else "without sound"
    passes = "with guidance" if t.guided else "without guidance"
    clips = "1 clip" if t.clips == 1 else f"{t.clips} clips"
    return (
        f"{t.model} on {plan.machine}: {clips} of {r.width}x{r.height} in {r.frames} frames {sound}, "
        f"{t.size.steps} steps {passes}"
    )


def name_of(choice: Choice, *, bfloat16: bool = True) -> str:
    """Such as `cfg=2,ulysses=4, bfloat16, offload block`."""
    s = choice.setting
    parts = [str(choice.layout), "bfloat16" if bfloat16 else "float16"]
    if s.precision.kind != "exact":
        parts[1] = str(s.precision)
    if choice.replicas > 1:
        parts.insert(0, f"{choice.replicas} groups of")
        parts[0:2] = [" ".join(parts[0:2])]
    if s.text_precision != "exact":
        parts.append(f"text {s.text_precision}")
    if s.offload != "none":
        parts.append(f"offload {s.offload}")
    if s.modulation != "resident":
        parts.append(f"modulation {s.modulation}")
    return ", ".join(parts)


def options_of(choice: Choice) -> list[str]:
    """The options of `diptych generate` and `serve` that run it so."""
    s = choice.setting
    options = [] if choice.layout.world == 1 else ["--layout", str(choice.layout)]
    if s.precision.kind != "exact":
        options += ["--precision", str(s.precision)]
    if s.text_precision != "exact":
        options += ["--text-precision", s.text_precision]
    if s.modulation != "resident":
        options += ["--modulation", s.modulation]
    if s.offload != "none":
        options += ["--offload", s.offload]
    if s.offload == "block" or s.chunks > 1 or choice.tiled:
        options += ["--memory", _size(choice.budget)]
    return options


def _size(budget: int) -> str:
    """A size that is read as no more than `budget`."""
    short = written(budget)
    return short if (pick_bytes("memory", short) or 0) <= budget else f"{budget}B"


def command_of(plan: Plan, choice: Choice) -> str:
    g, t = plan.task.geometry, plan.task
    size = ["--width", str(g.width), "--height", str(g.height), "--frames", str(g.frames), "--steps", str(t.size.steps)]
    if not t.guided and t.config.grid == 1:
        size += ["--guidance", "1"]
    if not t.size.A:
        size.append("--no-audio")
    if choice.replicas > 1:
        cards = ",".join(map(str, range(choice.cards)))
        side = ["--replicas", str(choice.replicas), "--gpus", cards]
        return shlex.join(["diptych", "serve", t.model, *side, *options_of(choice)])
    return shlex.join(
        ["diptych", "generate", "a red kite over the sea", "--model", t.model, *size, *options_of(choice)]
    )


def reasons(plan: Plan, choice: Choice) -> list[str]:
    """Why it is so and not otherwise, a sentence each."""
    s, layout, card = choice.setting, choice.layout, plan.machine.card
    said = [f"an approximation: {what}" for what in choice.approximate]
    if choice.replicas > 1:
        said.append(f"{choice.replicas} groups make clips side by side: nothing is sent between groups")
    if layout.cfg > 1:
        said.append("cfg=2: both passes of guidance at once, and nothing is sent inside a forward for it")
    if layout.ulysses > 1:
        said.append(f"ulysses={layout.ulysses}: tokens and heads are split; every rank sends less the more there are")
    if layout.ring > 1:
        said.append(f"ring={layout.ring}: tokens are split where heads do not go round")
    if layout.shard > 1:
        said.append(f"shard={layout.shard}: each rank keeps a part of the weights and borrows the others' in time")
    if layout.pipeline > 1:
        said.append(f"pipeline={layout.pipeline}: patches pass stages of blocks, one after the other")
    if layout.tensor > 1:
        said.append(f"tensor={layout.tensor}: each rank has a part of every product; only memory is won")
    idle = plan.machine.count - choice.cards
    if idle:
        more = any(c.cards > choice.cards and c.named == choice.named for c in plan.fitting)
        why = f"with more it would be less than {SAME:.0%} faster" if more else "no way that fits takes more"
        said.append(f"{idle} of {plan.machine.count} cards {'stays' if idle == 1 else 'stay'} idle: {why}")
    if not card.bfloat16:
        said.append(f"float16: {card.name} multiplies no bfloat16, and no fused kernel or flash attention runs on it")
    without = _without(plan, choice, offload="none", modulation="resident")
    if (s.offload, s.modulation) != ("none", "resident") and without is not None and without.why:
        said.append(f"with all weights on the card it {without.why}")
    if s.modulation == "tables":
        said.append("modulation tables: its weights wait in host memory and visit the card once a clip; the same bits")
    if s.offload == "model":
        said.append("offload model: text encoder, transformer and decoders are on the card one after the other")
    if s.offload == "block":
        blocks = plan.task.config.num_visual_blocks
        streamed = max(blocks - s.resident, 0) if s.resident + 2 < blocks else 0
        wait = forward_of(plan, choice).streaming
        cost = "hidden behind the arithmetic" if wait < 0.01 else f"{wait:.1f} s a forward of it not hidden"
        said.append(
            f"offload block: {streamed} of {blocks} blocks come from host memory in every forward, {cost}"
            if streamed
            else f"offload block: all {blocks} blocks stay while the clip is denoised; only the rest makes room"
        )
    if s.chunks > 1:
        said.append(f"the feed-forward runs in {s.chunks} parts of the sequence")
    if choice.tiled:
        said.append(
            f"the picture is decoded in {_tiles(plan, choice)} tiles, as {(choice.decode or 0) / GIB:.1f} GiB allow"
        )
    said.append(_where_time_goes(plan, choice))
    return said


def _tiles(plan: Plan, choice: Choice) -> int:
    size, cost = plan.task.size, fused_cost() if plan.rates.fused else released_cost()
    return len(plan_tiles(size.T, size.Y, size.X, choice.decode, cost).tiles)


def _without(plan: Plan, choice: Choice, **changed: str) -> Choice | None:
    """The way that differs from `choice` in nothing else."""
    wanted: dict[str, object] = {"precision": choice.setting.precision, **changed}
    for other in plan.choices:
        same = (other.layout, other.replicas) == (choice.layout, choice.replicas)
        if same and all(getattr(other.setting, name) == value for name, value in wanted.items()):
            return other
    return None


def _where_time_goes(plan: Plan, choice: Choice) -> str:
    f = forward_of(plan, choice)
    parts = {
        "products": f.linear,
        "video self-attention": f.self_attention,
        "everything small": f.other_attention + f.elementwise + f.launches,
        "sending": f.exchange,
        "waiting for weights": f.streaming,
    }
    told = ", ".join(f"{name} {value / f.total:.0%}" for name, value in parts.items() if value >= 0.005 * f.total)
    return f"a forward takes {f.total:.2f} s: {told}"


def table(choices: list[Choice], *, several: bool) -> list[str]:
    """A line a way."""
    groups = f"{'groups':>7}" if several else ""
    total = f"{'all, s':>10}" if several else ""
    wide = max([10, *(len(str(c.setting.precision)) + 2 for c in choices)])
    far = max([22, *(len(str(c.layout)) + 1 for c in choices)])
    head = f"{'layout':{far}}{'precision':>{wide}}{'offload':>8}{'modulation':>11}{groups}{'s a clip':>10}{total}"
    lines = [f"{head}{'GiB first':>10}{'others':>7}{'host':>6}"]
    for c in choices:
        s = c.setting
        groups = f"{c.replicas:7}" if several else ""
        total = f"{c.total:10.1f}" if several else ""
        others = f"{c.others.peak / GIB:7.1f}" if c.layout.world > 1 else f"{'':7}"
        how = f"{c.layout!s:{far}}{s.precision!s:>{wide}}{s.offload:>8}{s.modulation:>11}{groups}"
        lines.append(f"{how}{c.seconds.total:10.1f}{total}{c.first.peak / GIB:10.1f}{others}{c.host / GIB:6.0f}")
    return lines


def text(plan: Plan, rows: int = 6) -> str:
    """What `diptych plan` prints."""
    several, best = plan.task.clips > 1, plan.best
    lines = [headline(plan), ""]
    if best is None:
        lines += [f"Nothing fits in {shown(plan.budget)}.", *_misfits(plan, rows)]
        return "\n".join(lines)
    took = f"{best.seconds.total:.1f} s a clip" + (f", {best.total:.0f} s for all" if several else "")
    memory = f"{best.first.peak / GIB:.1f} of {plan.budget / GIB:.1f} GiB"
    lines += [f"{lead(plan, best)}: {name_of(best, bfloat16=plan.machine.card.bfloat16)}: {took}, {memory}", ""]
    lines += [f"  - {reason}" for reason in reasons(plan, best)]
    lines += ["", f"    {command_of(plan, best)}", ""]
    named = [choice for choice in plan.fitting if choice.named]
    if named:
        lines += [] if best.exact else ["Approximate, as asked for:"]
        lines += table(named[:rows], several=several)
    others = [choice for choice in plan.fitting if not choice.named]
    if others:
        lines += [""] * bool(named) + [
            "Approximate, taken only by name:",
            *table(others[: max(rows // 2, 1)], several=several),
        ]
    lines += _misfits(plan, rows)
    lines += ["", basis(plan)]
    return "\n".join(lines)


def lead(plan: Plan, choice: Choice) -> str:
    """What the way that is taken is, and whether anything is given up for it."""
    if choice.exact:
        return "Best"
    return "Best, an approximation as asked for" if choice.named else "Only an approximation fits"


def _misfits(plan: Plan, rows: int) -> list[str]:
    """What does not fit, and why, each way of running once, the nearest layout for it."""
    nearest: dict[tuple[Precision, str, str], Choice] = {}
    for choice in plan.choices:
        s = choice.setting
        key = (s.precision, s.offload, s.modulation)
        if not choice.fits and (key not in nearest or choice.first.peak < nearest[key].first.peak):
            nearest[key] = choice
    if not nearest:
        return []
    return ["", "Does not fit:"] + [
        f"  {choice.layout}, {precision}, offload {offload}, modulation {modulation}: {choice.why}"
        for (precision, offload, modulation), choice in list(nearest.items())[:rows]
    ]


def basis(plan: Plan) -> str:
    """Where the seconds come from."""
    card = plan.machine.card
    if plan.rates.measured:
        sent = "; what cards send each other is an estimate" if plan.machine.count > 1 and not plan.machine.link else ""
        return f"Rates of {card.name}: measured on one card{sent}. Writing the MP4 and loading are not counted."
    return (
        f"Rates of {card.name}: its data sheet ({card.source}) times the shares measured on an H200: an estimate. "
        "Writing the MP4 and loading are not counted."
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """All of it, for programs: bytes and seconds."""
    t, g, card = plan.task, plan.task.geometry, plan.machine.card
    best = plan.best
    return {
        "model": t.model,
        "geometry": str(g),
        "clips": t.clips,
        "steps": t.size.steps,
        "lanes": t.size.lanes,
        "machine": {
            "card": card.name,
            "count": plan.machine.count,
            "found_here": plan.machine.found,
            "usable_bytes": card.usable,
            "host_bytes": plan.machine.host_memory,
            "rates": "measured" if plan.rates.measured else "estimated",
        },
        "budget_bytes": plan.budget,
        "best": None if best is None else choice_json(plan, best) | {"reasons": reasons(plan, best)},
        "choices": [choice_json(plan, choice) for choice in plan.choices],
    }


def choice_json(plan: Plan, choice: Choice) -> dict[str, Any]:
    s, seconds = choice.setting, choice.seconds
    return {
        "layout": str(choice.layout),
        "groups": choice.replicas,
        "precision": str(s.precision),
        "text_precision": s.text_precision,
        "dtype": "bfloat16" if plan.machine.card.bfloat16 else "float16",
        "offload": s.offload,
        "modulation": s.modulation,
        "resident_blocks": s.resident if s.offload == "block" else plan.task.config.num_visual_blocks,
        "feed_forward_parts": s.chunks,
        "decode_bytes": choice.decode,
        "exact": choice.exact,
        "approximate": list(choice.approximate),
        "fits": choice.fits,
        "why_not": choice.why,
        "peak_bytes": {"first": choice.first.peak, "others": choice.others.peak},
        "phases": {name: {"weights": p.weights, "work": p.work} for name, p in choice.first.phases.items()},
        "host_bytes": choice.host,
        "seconds": {name: getattr(seconds, name) for name in ("text", "denoise", "decode", "moving", "total")},
        "seconds_for_all": choice.total,
        "options": options_of(choice),
    }
