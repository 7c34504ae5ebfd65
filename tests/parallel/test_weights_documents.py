"""docs/parallel.md tells how large the parts are, and what is tested with what: both are written by the code."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

from test_weights import COMBINATIONS

from diptych.codecs.tiles import plan_tiles
from diptych.memory.footprint import Setting, transformer_weights
from diptych.model.config import LITE, PRO, TransformerConfig
from diptych.parallel import Layout

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "parallel.md").read_text()
AXES = ("cfg", "ulysses", "ring", "pipeline", "tensor", "shard")


def test_parts_of_the_weights_are_those_computed():
    rows = re.findall(r"^\| `([a-z=0-9,]+)` \| (\d) \| ((?:[\d.]+ \| ){3}[\d.]+) \|$", PAGE, re.MULTILINE)
    assert len(rows) == 7
    for text, ranks, cells in rows:
        layout = Layout.parse(text)
        assert layout.world == int(ranks)
        assert cells.split(" | ") == [cell for config in (PRO, LITE) for cell in gigabytes(layout, config)]


def gigabytes(layout: Layout, config: TransformerConfig) -> tuple[str, str]:
    """With and without the modulations."""
    weights = transformer_weights(config, Setting(tensor=layout.tensor, shard=layout.shard))
    return f"{weights.total / 1e9:.1f}", f"{(weights.total - weights.modulation) / 1e9:.1f}"


def test_what_is_on_every_rank_is_little():
    weights = transformer_weights(PRO, Setting())
    assert 0.0005 < (weights.outer - weights.towers) / weights.total < 0.005


def test_the_table_of_what_combines_is_that_of_the_tests():
    tested = [axes(text) for text in COMBINATIONS]
    for file in ("engine/test_layouts.py", "pipeline/test_pipefusion.py"):
        tested += [axes(text) for text in re.findall(r'"((?:[a-z]+=\d,?)+)"', (TESTS / file).read_text())]
    header = "| | " + " | ".join(f"`{axis}`" for axis in AXES) + " |"
    lines = [header, "|---" * 7 + "|"]
    for row in AXES:
        cells = ["yes" if any({row, column} <= of for of in tested) else "" for column in AXES]
        cells[AXES.index(row)] = "yes" if {row} in tested else ""
        lines.append(f"| `{row}` | " + " | ".join(cells) + " |")
    assert "\n".join(lines).replace("|  ", "| ") in PAGE
    missing = [pair for pair in combinations(AXES, 2) if not any(set(pair) <= of for of in tested)]
    assert missing == [], "every pair is held against one rank somewhere"


def axes(text: str) -> set[str]:
    return {axis for axis in AXES if getattr(Layout.parse(text), axis) > 1}


def test_a_default_plan_on_eight_ranks_takes_two_rounds():
    assert len(plan_tiles(32, 60, 108).tiles) == 11
    assert "has 11 windows: on 8 ranks that is two rounds instead of 11" in " ".join(PAGE.split())
