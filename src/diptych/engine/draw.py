"""A picture of a trace: a lane for every rank, and how much of the time all of them computed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from diptych.engine.lanes import summarise, union
from diptych.engine.tracing import ATTENTION, EXCHANGE, KINDS, LINEAR, OTHER, RankTrace
from diptych.media.files import replacing

_COLOURS = {ATTENTION: "#4063d8", LINEAR: "#389826", OTHER: "#9aa5b1", EXCHANGE: "#d8394a"}
_NAMES = {
    ATTENTION: "attention",
    LINEAR: "linear layers",
    OTHER: "everything else",
    EXCHANGE: "standing still: bytes travel, or another rank is late",
}


def draw_traces(traces: Sequence[RankTrace], path: Path) -> None:
    """Write a PNG: on top one step in detail, below the mean seconds a step of every rank. Raises `MediaError`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    report = summarise(traces)
    detail = min(len(traces[0].steps) - 1, 1)  # the first step also warms up
    zero = min(trace.steps[detail].start for trace in traces)
    lanes = len(traces)
    figure, (top, below) = plt.subplots(
        2, 1, figsize=(12, 2.6 + 0.95 * lanes), height_ratios=(1.25, 1), layout="constrained"
    )
    for lane, trace in enumerate(traces):
        for kind in KINDS:
            spans = union((a - zero, b - zero) for k, a, b in trace.steps[detail].spans if k == kind)
            bars = [(a, b - a) for a, b in spans]
            top.broken_barh(bars, (lane - 0.38, 0.76), color=_COLOURS[kind], linewidth=0)
        left = 0.0
        seconds = report["ranks"][lane]["seconds_per_step"]
        parts = [(ATTENTION, "attention"), (LINEAR, "linear"), (OTHER, "other")]
        for kind, name in parts:
            below.barh(lane, seconds[name], 0.7, left=left, color=_COLOURS[kind])
            left += seconds[name]
        below.barh(lane, seconds["communication"], 0.7, left=left, color=_COLOURS[EXCHANGE])
        left += seconds["communication"]
        below.barh(lane, seconds["waiting"], 0.7, left=left, color="white", edgecolor=_COLOURS[EXCHANGE], hatch="////")
        left += seconds["waiting"]
        sent = report["ranks"][lane]["bytes_per_block"]
        use = report["ranks"][lane].get("gpu_utilisation")
        note = f" {left:.3g} s" + (f", {_size(sent)} a block" if sent else "") + (f", GPU {use:.0f} %" if use else "")
        below.text(left, lane, note, va="center", fontsize=9, color="#444")
        below.set_xlim(0, max(below.get_xlim()[1], left * 1.22))
    for axes, title in (
        (top, f"Step {detail + 1}, second by second"),
        (below, "Mean step: hatched is waiting for a late rank"),
    ):
        axes.set_yticks(range(lanes), [f"rank {trace.rank}" for trace in traces])
        axes.set_ylim(lanes - 0.5, -0.5)
        axes.set_xlabel("seconds")
        axes.set_title(title, loc="left", fontsize=10)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    top.set_xlim(left=0)
    handles = [Patch(color=_COLOURS[kind], label=_NAMES[kind]) for kind in KINDS]
    figure.legend(handles=handles, loc="outside lower left", ncols=4, frameon=False, fontsize=9)
    ranks = {1: "the rank computed", 2: "both ranks computed"}.get(lanes, f"all {lanes} ranks computed")
    figure.suptitle(f"{ranks} in {report['all_busy']:.1%} of the denoising time", x=0.01, ha="left", fontweight="bold")
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=110)
    plt.close(figure)


def _size(count: int) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} B"
