"""The model of costs against what was measured: benchmarks/results/settings.json, to which every run is added."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from diptych.codecs.tiles import decode_peak, fused_cost, plan_tiles
from diptych.memory.footprint import GIB, Setting, footprint
from diptych.parallel.layout import Layout
from diptych.planner.cards import CARDS
from diptych.planner.cost import clip, decode, forward
from diptych.planner.rates import Rates
from diptych.planner.task import task_of

FILE = Path(__file__).parents[2] / "benchmarks" / "results" / "settings.json"
MEASURED = json.loads(FILE.read_text())["settings"]
WITHIN_SECONDS, WITHIN_BYTES = 0.10, 0.05


def name(row):
    return "-".join(row[key] for key in ("what", "card", "model", "layout", "precision", "modulation", "offload"))


def predicted(row):
    """(seconds, bytes) of a measured setting. Bytes are those of a rank that holds the transformer, as it was run."""
    task = task_of(row["model"], row["geometry"], text=row["text"])
    layout, rates = Layout.parse(row["layout"]), Rates.of(CARDS[row["card"]], row.get("link"))
    budget = row.get("decode_budget")
    tiles = plan_tiles(task.size.T, task.size.Y, task.size.X, budget, fused_cost())
    setting = Setting(
        precision=row["precision"],
        modulation=row["modulation"],
        modulation_itemsize=task.modulation_itemsize,
        offload=row["offload"],
        resident=row.get("resident", 0),
        chunks=row.get("chunks", 1),
        ulysses=layout.ulysses,
        ring=layout.ring,
        tensor=layout.tensor,
        shard=layout.shard,
        pipeline=layout.pipeline,
    )
    peak = decode_peak(task.size.T, task.size.Y, task.size.X, budget, fused_cost())
    if row["what"] == "decode":
        return decode(tiles, layout.world, rates), peak
    held = footprint(task.config, task.size, setting, decode=peak, parts=task.parts, first=False).peak
    one = forward(task.config, task.size, setting, rates).total
    if row["what"] == "forward":
        return one, held
    whole = clip(task.config, task.size, layout, setting, rates, task.parts, tiles)
    return (whole.denoise / task.size.steps if row["what"] == "step" else whole.total), held


@pytest.mark.parametrize("row", MEASURED, ids=name)
def test_time_is_predicted_within_a_tenth(row):
    seconds, _ = predicted(row)
    assert seconds == pytest.approx(row["seconds"], rel=WITHIN_SECONDS)


@pytest.mark.parametrize("row", [row for row in MEASURED if row["peak_gib"] is not None], ids=name)
def test_memory_is_predicted_within_a_twentieth(row):
    _, held = predicted(row)
    assert held / GIB == pytest.approx(row["peak_gib"], rel=WITHIN_BYTES)


def test_every_measured_setting_says_where_it_is_from():
    for row in MEASURED:
        assert row["what"] in ("forward", "step", "decode", "clip")
        assert row["source"] and row["seconds"] > 0 and row["card"] in CARDS
