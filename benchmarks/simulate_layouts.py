"""Compute of one rank of 1, 2, 4 and 8, on one GPU: `python benchmarks/simulate_layouts.py OUT.json [blocks] [model]`.

The same as `diptych bench attention --simulate`, without the command line's dependencies, for a few blocks: about half
a minute for 12 blocks of Pro on an H200. What is told of a layout is one rank's share of a guided step beside 1/N of
one rank's: 100 % is work perfectly divided. On a CPU it is the tiny model.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from diptych.bench.geometry import Geometry
from diptych.bench.layouts import bench_layouts, layouts_table
from diptych.parallel import Layout

LAYOUTS = ["single", "ulysses=2", "ring=2", "cfg=2"]
LAYOUTS += ["ulysses=4", "ring=4", "ring=2,ulysses=2", "cfg=2,ulysses=2"]
LAYOUTS += ["ulysses=8", "ring=8", "ring=2,ulysses=4", "cfg=2,ulysses=4"]


def main() -> None:
    cuda = torch.cuda.is_available()
    blocks = int(sys.argv[2]) if len(sys.argv) > 2 else 12 if cuda else None
    model = sys.argv[3] if len(sys.argv) > 3 else "pro" if cuda else "tiny"
    result = bench_layouts(
        model,
        Geometry.parse("864x480x125" if cuda else "128x80x49"),
        [1, 2, 4, 8],
        device=torch.device("cuda" if cuda else "cpu"),
        blocks=blocks,
        repeats=2,
        only=[Layout.parse(text) for text in LAYOUTS],
    )
    print(layouts_table(result))
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
