"""The model of costs against what was measured: benchmarks/results/settings.json, to which every run is added."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from tools.planning_document import MEASURED as FILE
from tools.planning_document import predicted

from diptych.attention import merge, merge_kernel
from diptych.memory.footprint import GIB
from diptych.planner.cards import CARDS
from diptych.planner.cost import merging

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


@pytest.mark.parametrize("row", [row for row in MEASURED if row["peak_gib"] is not None], ids=name)
def test_hardly_more_memory_is_taken_than_was_predicted(row):
    """A limit is held only where the prediction is no less than what is taken; 1 % is half of what is left free."""
    _, held = predicted(row)
    assert row["peak_gib"] <= 1.01 * held / GIB


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("count", [2, 3, 8])
def test_merging_partial_results_is_counted_as_it_is_done(count, dtype, monkeypatch):
    """What the kernel reads and writes; log-sum-exps, one number a head, are not counted."""
    moved = []

    def counted(old, largest, weight, out, lse, into):
        added = merge._added(merge.Sums(old, largest, weight), out, lse, into)
        moved.extend(x.nbytes for x in (old, out, added.out_BSHK))
        return added

    monkeypatch.setattr(merge, "fusible", lambda *_: True)
    monkeypatch.setattr(merge_kernel, "added", counted)
    parts = [(torch.randn(1, 2, 2, 64, dtype=dtype), torch.randn(1, 2, 2)) for _ in range(count)]
    merge.merge(parts, dtype)
    assert sum(moved) / parts[0][0].numel() == merging(count, dtype.itemsize)


def test_every_measured_setting_says_where_it_is_from():
    for row in MEASURED:
        assert row["what"] in ("forward", "step", "decode", "clip", "rank")
        assert row["source"] and row["seconds"] > 0 and row["card"] in CARDS


OFFLOAD = {
    "host": {},
    "geometry": "864x480x125",
    "pro": {
        "modulation parked in": 1.0,
        "resident, with modulation (model offload)": {"first": 9.0, "seconds": 6.8, "allocated GiB": 67.5},
        "resident": {"first": 6.8, "seconds": 6.8, "allocated GiB": 50.0},
        "host": {"moved in": 2.0, "GiB": 51.0},
        "block, 20 GiB": {
            "first": 7.0, "seconds": 6.9, "allocated GiB": 19.5, "resident blocks": 15, "chunks": 1, "cap GiB": 20.0,
        },
        "block, 6.5 GiB": "OutOfMemoryError: no",
    },
    "decode": {"within 14.5 GiB": {"first": 3.0, "seconds": 2.6, "allocated GiB": 9.2, "tiles": 11}},
    "text": "left out: no time",
}  # fmt: skip
MULTI_GPU = {
    "worlds": {
        "1": {"links": {"alone": "one rank has no links"}, "lite": {"bf16, single": {"step s": 3.0, "peak GiB": 8.5}}},
        "2": {
            "lite": {"fp8, cfg=2": {"step s": 1.2, "peak GiB": 0.0}, "simulated, ulysses=2": {"step s": 1.0}},
            "pro-distill": {"clip, bf16, ulysses=2": {"denoise s": 34.0, "clip s": 36.0}, "state": "done"},
        },
    }
}


H200_RUN = {
    "pro": {"bf16": {"seconds": [7.0], "peak GiB": 67.8}, "fp8 products and attention": {"failed": "no"}},
    "lite": {"parked in": 1.3, "bf16": {"seconds": [1.52], "peak GiB": 6.24}},
    "decode": {"diptych": 2.5, "diptych peak GiB": 9.2, "within 6 GiB": [22, 2.7], "within 6 GiB, peak GiB": 5.4},
    "clip": {"precision": "fp8", "clip s": 50.0},
}
PLAYED = {
    "model": "pro",
    "blocks": 12,
    "geometry": "864x480x125",
    "layouts": [{"layout": "ring=8", "forward": 0.2}, {"layout": "cfg=2,ulysses=4", "forward": 0.4}],
}
FORWARD = {
    "model": "lite", "geometry": "864x480x125", "text_tokens": 200, "peak_bytes": {"diptych": 8.9e9, "diffusers": 1e10},
    "seconds": {"diptych": 1.35, "diffusers": 2.3},
}  # fmt: skip
RESULTS = [
    ("forward", FORWARD, 1),
    ("played", PLAYED, 2),
    ("offload", OFFLOAD, 4),
    ("multi", MULTI_GPU, 3),
    ("run", H200_RUN, 5),
    ("several", {"offload": OFFLOAD, "h200_run": H200_RUN, "simulate": PLAYED, "machine": {}}, 9),
]


@pytest.mark.parametrize(("name", "result", "lines"), RESULTS)
def test_results_of_the_benchmarks_become_settings(tmp_path, name, result, lines):
    """What failed or was left out is passed over; what is no setting is too."""
    file = tmp_path / f"{name}.json"
    file.write_text(json.dumps(result))
    script = FILE.parents[1] / "measured_settings.py"
    command = [sys.executable, str(script), str(file), "h200", "--dry"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    told = done.stdout.splitlines()
    assert len(told) == lines, done.stdout
    assert all(" s " in line and "%" in line for line in told)
    if name in ("offload", "several"):
        assert any("pro, block, 20 GiB" in line and "19.50 GiB" in line for line in told)
    elif name == "played":
        assert [line.split()[0] for line in told] == ["ring=8", "cfg=2,ulysses=4"]
    elif name == "run":
        (lite,) = [line for line in told if line.startswith("lite, bf16")]
        assert abs(float(lite.split()[-1].rstrip("%"))) < 100 * WITHIN_BYTES, "its modulation waited in host memory"
    elif name == "multi":
        assert any(line.startswith("2 ranks, lite, fp8, cfg=2") and "GiB" not in line for line in told)
