"""docs/caches.md tells what the code does."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest

from diptych.request import ClipDefaults, ClipRequest
from diptych.sampling.caches import CACHES, parse
from diptych.sampling.caches.base import Run
from diptych.sampling.caches.calibration import published
from diptych.sampling.caches.magcache import magcache_plan
from diptych.sampling.caches.taylor import Taylor, TaylorSettings

PAGE = (Path(__file__).parents[2] / "docs" / "caches.md").read_text()


@pytest.mark.parametrize("name", CACHES)
def test_names_and_defaults(name):
    (told,) = re.findall(rf"^\| `{name}` \| ([^|]*) \|", PAGE, re.MULTILINE)
    settings = parse(name)
    values = [f"{field.name} {getattr(settings, field.name):g}" for field in fields(settings)]
    assert told.replace(" (any)", "") == (", ".join(values) or "–")


def test_counts_of_magcache():
    rows = re.findall(r"^\| ([\d.]+), (\d), ([\d.]+) \| (\d+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 5
    defaults = ClipDefaults(steps=50, guidance=5.0, distilled=False, has_audio=True, has_image=True)
    known = published().known(ClipRequest("x").resolve(defaults))
    for *values, forwards in rows:
        plan = magcache_plan(known.ratios, parse("magcache:" + ",".join(values)))
        assert sum(sum(lane) for lane in plan) == int(forwards)


def test_the_report_of_the_example():
    (told,) = re.findall(r"# (\{.*), \.\.\.\]\}", PAGE)
    taylor = Taylor(TaylorSettings(), Run(2, 50))
    for step in range(50):
        taylor.steps.decide(step, lambda: False)
    (lane, _) = taylor.report()["lanes"]
    assert json.loads(told + "]}") == {"computed": 2 * lane["computed"], "total": 100, "lanes": [lane]}


def test_every_spec_in_it_is_accepted():
    specs = re.findall(rf"(?:--cache |`|cache=\")((?:{'|'.join(CACHES)}):[^\s`\"]+)", PAGE)
    assert len(specs) >= 4
    for spec in specs:
        parse(spec)
