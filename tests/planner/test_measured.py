"""The model of costs against what was measured: benchmarks/results/settings.json, to which every run is added."""

from __future__ import annotations

import json

import pytest
from tools.planning_document import MEASURED as FILE
from tools.planning_document import predicted

from diptych.memory.footprint import GIB
from diptych.planner.cards import CARDS

MEASURED = json.loads(FILE.read_text())["settings"]
WITHIN_SECONDS, WITHIN_BYTES = 0.10, 0.05


def name(row):
    return "-".join(row[key] for key in ("what", "card", "model", "layout", "precision", "modulation", "offload"))


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
