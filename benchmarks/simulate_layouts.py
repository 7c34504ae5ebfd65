"""Per-rank compute of Pro for 1, 2, 4, 8 ranks, on one GPU: `python benchmarks/simulate_layouts.py OUT.json [blocks]`.

The same as `diptych bench attention --simulate`, without the command line's dependencies.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from diptych.bench.geometry import Geometry
from diptych.bench.layouts import bench_layouts, layouts_table
from diptych.parallel import Layout

LAYOUTS = ["single", "ulysses=2", "ring=2", "cfg=2", "ulysses=4", "ring=4", "ring=2,ulysses=2", "cfg=2,ulysses=2"]
LAYOUTS += ["ulysses=8", "ring=8", "ring=2,ulysses=4", "cfg=2,ulysses=4", "cfg=2,ring=4"]


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    blocks = int(sys.argv[2]) if len(sys.argv) > 2 else None
    model, size = ("pro", "864x480x125") if device.type == "cuda" else ("tiny", "128x80x49")
    result = bench_layouts(
        model,
        Geometry.parse(size),
        [1, 2, 4, 8],
        device=device,
        blocks=blocks,
        repeats=2,
        only=[Layout.parse(text) for text in LAYOUTS],
    )
    print(layouts_table(result))
    Path(sys.argv[1]).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
