"""Writes the generated parts of docs/planning.md: choices for common machines, cards, rates, and what was measured.

    python tools/planning_document.py [--check]

Each part stands between `<!-- NAME -->` and `<!-- end -->`. `--check` changes nothing and fails where one is stale.
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

from diptych.codecs.tiles import decode_peak, fused_cost, plan_tiles
from diptych.memory.footprint import GIB, Parts, Setting, footprint
from diptych.memory.precision import FP8, Precision
from diptych.parallel.layout import Layout
from diptych.planner import rates as shares
from diptych.planner import tell
from diptych.planner.cards import CARDS
from diptych.planner.choices import Choice, Plan, plan
from diptych.planner.cost import clip, decode, forward
from diptych.planner.machine import machine_of
from diptych.planner.rates import Rates
from diptych.planner.task import task_of

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "planning.md"
MEASURED = ROOT / "benchmarks" / "results" / "settings.json"
GEOMETRY = "864x480x121"
MACHINES = ("1xT4", "2xT4", "1x4090", "1xH100-80", "8xH100-80", "4xH200")
FA3, FA3_FP8 = {128: 0.668, 64: 0.53}, {128: 0.433, 64: 0.327}
"""What FlashAttention-3 gets of an H200's data sheet, in bf16 and in fp8: for settings measured with it."""
MODELS = ("lite-distill", "lite", "pro-distill", "pro")


def choices() -> str:
    """For every machine the best way for each model, and why for one of them."""
    parts = []
    for name in MACHINES:
        machine = machine_of(name)
        plans = [plan(task_of(model, GEOMETRY), machine) for model in MODELS]
        known = "by rates measured on one of them" if plans[0].rates.measured else "estimated"
        lines = [
            f"### {name}",
            "",
            f"{machine.card.usable / GIB:.1f} GiB usable a card; seconds are {known}.",
            "",
            "| model | take | seconds a clip | GiB a card | GiB of host memory | with fp8 |",
            "|---|---|---|---|---|---|",
        ]
        lines += [_row(found) for found in plans]
        told = plans[1] if machine.card.name == "t4" else plans[-1]
        if told.best is not None:
            lines += ["", f"Why, for {told.task.model}:", ""]
            lines += [f"- {reason}" for reason in tell.reasons(told, told.best)]
            lines += ["", f"      {tell.command_of(told, told.best)}"]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _row(found: Plan) -> str:
    best = found.best
    if best is None:
        return f"| {found.task.model} | nothing fits | | | | |"
    fast = next((choice for choice in found.fitting if choice.setting.precision == FP8), None)
    approximate = "" if fast is None else f"{_seconds(fast)}"
    peak = f"{best.first.peak / GIB:.1f}"
    if best.layout.world > 1:
        peak += f", others {best.others.peak / GIB:.1f}"
    name = tell.name_of(best, bfloat16=found.machine.card.bfloat16)
    return f"| {found.task.model} | {name} | {_seconds(best)} | {peak} | {best.host / GIB:.0f} | {approximate} |"


def _seconds(choice: Choice) -> str:
    return f"{choice.seconds.total:.0f}" if choice.seconds.total >= 20 else f"{choice.seconds.total:.1f}"


def cards() -> str:
    lines = [
        "| card | memory, GiB | 16 bit, TFLOP/s | fp8 | memory, TB/s | to a card, GB/s | to the host, GB/s | source |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for card in CARDS.values():
        fp8 = "" if card.fp8 is None else f"{card.fp8:g}"
        link = f"{card.nvlink:g} NVLink" if card.nvlink else f"{card.bus:g} PCIe"
        half = f"{card.half:g}" + ("" if card.bfloat16 else " (float16 alone)")
        cells = (card.name, f"{card.memory:g}", half, fp8, f"{card.bandwidth:g}", link, f"{card.bus:g}", card.source)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rates() -> str:
    rows = (
        ("products, bfloat16", shares.LINEAR, "measured"),
        ("products, fp8", shares.LINEAR_FP8, "measured"),
        ("video self-attention, heads of 128, Hopper", shares.ATTENTION[128], "measured"),
        ("the same, heads of 64", shares.ATTENTION[64], "measured"),
        ("the same in fp8, heads of 128", shares.ATTENTION_FP8[128], "measured"),
        ("the same in fp8, heads of 64", shares.ATTENTION_FP8[64], "measured"),
        (
            "video self-attention by cuDNN, heads of 128",
            shares.FLASH[128],
            "measured; taken for cards that are no Hopper",
        ),
        ("the same, heads of 64", shares.FLASH[64], "by the ratio of FlashAttention-3"),
        ("of that, where no flash kernel runs (T4)", shares.EFFICIENT, "assumed"),
        ("copies", shares.COPY, "measured"),
        ("element-wise kernels", shares.ELEMENTWISE, "measured"),
        ("their time where they also quantise (fp8)", shares.ELEMENTWISE_FP8, "measured, times"),
        ("their time where no fused kernel runs", shares.PLAIN, "measured on Lite, times"),
        ("attention with one short side, of copies", shares.SHORT, "measured"),
        ("the same, Hopper", shares.SHORT_HOPPER, "measured"),
        ("NVLink", shares.LINK, "assumed"),
        ("PCIe to the host, page-locked", shares.BUS, "measured: 49 GB/s"),
        ("PCIe to another card", shares.PEER, "assumed"),
    )
    lines = ["| of the data sheet | share | |", "|---|---|---|"]
    return "\n".join(lines + [f"| {what} | {share:.3g} | {how} |" for what, share, how in rows])


def measured() -> str:
    lines = [
        "| | setting | measured, s | predicted, s | | measured, GiB | predicted, GiB | |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in json.loads(MEASURED.read_text())["settings"]:
        seconds, held = predicted(row)
        name = f"{row['card']}, {row['model']}, {row['layout']}, {row['precision']}"
        name += "".join(
            f", {key} {row[key]}" for key in ("offload", "modulation") if row[key] not in ("none", "resident")
        )
        name += f", {row['resident']} blocks stay" if row["offload"] == "block" else ""
        name += f", feed-forward in {row['chunks']} parts" if row.get("chunks", 1) > 1 else ""
        name += f", within {row['decode_budget'] / GIB:.1f} GiB" if "decode_budget" in row else ""
        name += f", {row['blocks']} blocks" if "blocks" in row else ""
        memory = "| | |"
        if row["peak_gib"] is not None:
            memory = f"{row['peak_gib']:.1f} | {held / GIB:.1f} | {held / GIB / row['peak_gib'] - 1:+.1%} |"
        off = seconds / row["seconds"] - 1
        digits = 2 if row["seconds"] >= 1 else 3
        times = f"{row['seconds']:.{digits}f} | {seconds:.{digits}f} | {off:+.1%}"
        lines.append(f"| {row['what']} | {name} | {times} | {memory}")
    return "\n".join(lines)


def predicted(row: dict[str, object]) -> tuple[float, int]:
    """(seconds, bytes) of a measured setting.

    Bytes are of a rank that holds the transformer and one set of modulations and nothing else, as benchmarks do.
    """
    task = task_of(str(row["model"]), str(row["geometry"]), text=int(str(row["text"])))
    layout, rates_ = Layout.parse(str(row["layout"])), Rates.of(CARDS[str(row["card"])])
    if row.get("attention") == "fa3":
        half, fp8 = CARDS[str(row["card"])].half * 1e12, (CARDS[str(row["card"])].fp8 or 0.0) * 1e12
        former = {"attention": {K: share * half for K, share in FA3.items()}}
        former["attention_fp8"] = {K: share * fp8 for K, share in FA3_FP8.items()}
        rates_ = replace(rates_, **former)
    size, budget = task.size, row.get("decode_budget")
    assert budget is None or isinstance(budget, int)
    tiles = plan_tiles(size.T, size.Y, size.X, budget, fused_cost())
    fixed = {name: row[name] for name in ("modulation", "offload")} | {
        "precision": Precision.parse(str(row["precision"]))
    }
    fixed |= {name: row[name] for name in ("resident", "chunks") if name in row}
    fixed |= {name: getattr(layout, name) for name in ("ulysses", "ring", "tensor", "shard", "pipeline")}
    setting = Setting(modulation_itemsize=task.modulation_itemsize, **fixed)  # type: ignore[arg-type]
    peak = decode_peak(size.T, size.Y, size.X, budget, fused_cost())
    if row["what"] == "decode":
        return decode(tiles, layout.world, rates_), peak
    alone = Parts(language=0, language_layer=0, language_layers=0, clip=0, vae=0, sound=0)
    one = replace(size, steps=1, lanes=1)
    held = footprint(task.config, one, setting, decode=0, parts=alone, first=False).phases["denoise"].peak
    if row["what"] == "rank":
        config = replace(task.config, num_visual_blocks=int(str(row["blocks"])))
        played = replace(rates_, link=rates_.copy / 2)  # what would be sent is read and written on the card
        return forward(config, size, setting, played).total, held
    if row["what"] == "forward":
        return forward(task.config, size, setting, rates_).total, held
    whole = clip(task.config, size, layout, setting, rates_, task.parts, tiles)
    return (whole.denoise / size.steps if row["what"] == "step" else whole.total), held


PARTS = {"choices": choices, "cards": cards, "rates": rates, "measured": measured}


def rendered(text: str) -> str:
    """The document with its generated parts made anew."""
    for name, make in PARTS.items():
        pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert pattern.search(text), f"{DOCUMENT.name} has no part {name}"
        new = make()
        text = pattern.sub(lambda found, new=new: f"{found[1]}\n{new}\n\n{found[2]}", text)  # type: ignore[misc]
    return text


def main() -> None:
    text = DOCUMENT.read_text()
    new = rendered(text)
    if "--check" in sys.argv:
        sys.exit(0 if new == text else f"{DOCUMENT.name} is stale: run python tools/planning_document.py")
    DOCUMENT.write_text(new)


if __name__ == "__main__":
    main()
