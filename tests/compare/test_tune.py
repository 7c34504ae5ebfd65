"""`diptych tune`: every setting against exact, and the frontier of time against quality."""

from __future__ import annotations

import json

import numpy as np
from typer.testing import CliRunner

from diptych.bench.tune import Point, frontier, plot, table
from diptych.cli.main import app


def point(seconds, psnr, cache="none") -> Point:
    return Point("exact", cache, 50, seconds, 1.0, psnr, 0.9, None)


EXACT, GOOD, SLOW, FAST = (
    point(10, np.inf),
    point(6, 35, "taylor:1,1"),
    point(8, 30, "firstblock"),
    point(4, 22, "taylor:1,3"),
)


def test_what_is_slower_and_worse_is_not_on_the_frontier():
    assert frontier([FAST, SLOW, GOOD, EXACT]) == [EXACT, GOOD, FAST]


def test_the_fastest_that_keeps_the_budget_is_marked():
    lines = table([FAST, SLOW, GOOD, EXACT], "lite", 30).splitlines()
    assert lines[1].endswith("diptych generate PROMPT --model lite --steps 50")
    assert lines[2].endswith("--cache taylor:1,1 <")
    assert len(lines) == 4


def test_the_plot(tmp_path):
    plot([FAST, SLOW, GOOD, EXACT], tmp_path / "p.png", 30)
    assert (tmp_path / "p.png").stat().st_size > 20_000


def test_the_command_tries_every_setting_and_leaves_out_what_was_not_calibrated(tiny_base, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    size = ["--width", "48", "--height", "32", "--frames", "5", "--steps", "5", "--device", "cpu"]
    caches = ["--cache", "taylor:1,1", "--cache", "magcache"]
    command = ["tune", str(tiny_base), "--prompt", "waves", *caches, *size, "--json", "--quiet"]
    done = CliRunner().invoke(app, command)
    assert done.exit_code == 0, done.output
    points = json.loads(done.output)
    assert [(p["cache"], p["steps"]) for p in points] == [("none", n) for n in (5, 4, 3, 2)] + [("taylor:1,1", 5)]
    assert points[0]["psnr"] is None and points[0]["computed"] == 1.0
    assert points[4]["computed"] == 0.6
    assert all(5 < p["psnr"] < 60 and p["seconds"] > 0 for p in points[1:])
