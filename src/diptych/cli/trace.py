"""`diptych trace`: draw what the ranks of a traced clip did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def trace(
    folder: Annotated[Path, typer.Argument(help="What `diptych generate --trace` wrote.", metavar="DIR")],
    output: Annotated[Path | None, typer.Option(help="The picture. Default: trace.png in the folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Also print the figures.")] = False,
) -> None:
    """Draw a lane for every rank, and the share of time in which all of them computed."""
    from diptych.engine.draw import draw_traces
    from diptych.engine.lanes import read_traces, summarise

    traces = read_traces(folder)
    target = output or folder / "trace.png"
    draw_traces(traces, target)
    if as_json:
        print(json.dumps(summarise(traces)))
    else:
        print(f"{target}: all ranks computed in {summarise(traces)['all_busy']:.1%} of the time")
