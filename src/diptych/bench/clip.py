"""Whole clips from a checkpoint, stage by stage: what a user waits for."""

from __future__ import annotations

import statistics
import time
from typing import Any

from diptych.bench.geometry import Geometry
from diptych.engine.engine import Engine
from diptych.request import ClipRequest

PROMPT = "waves break on a rocky shore at dusk while gulls cry"


def bench_clip(
    checkpoint: str | None,
    geometry: Geometry,
    *,
    device: str | None = None,
    steps: int | None = None,
    precision: str = "exact",
    modulation: str = "resident",
    repeats: int = 1,
) -> dict[str, Any]:
    """Load a checkpoint, make one clip to warm up and `repeats` more; medians, but for `load` and `first`."""
    start = time.perf_counter()
    with Engine.load(checkpoint, device=device, precision=precision, modulation=modulation) as engine:
        loaded = time.perf_counter() - start
        request = ClipRequest(
            PROMPT, width=geometry.width, height=geometry.height, frames=geometry.frames, steps=steps, seed=1
        )
        times, reports = [], []
        for _ in range(1 + repeats):
            start = time.perf_counter()
            clip = engine.generate(request)
            times.append(time.perf_counter() - start)
            assert clip is not None, "one process has the clip"
            reports.append(clip.report)
    stages = [report["seconds"] for report in reports[1:]]
    medians = {name: statistics.median(stage[name] for stage in stages) for name in stages[0]}
    report = {name: value for name, value in reports[-1].items() if name not in ("request", "seconds")}
    seconds = {"load": loaded, "first": times[0], "clip": statistics.median(times[1:]), **medians}
    return {"geometry": str(geometry), "seconds": seconds, "all_seconds": times[1:], "report": report}
