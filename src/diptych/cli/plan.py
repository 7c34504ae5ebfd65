"""`diptych plan`: which layout, precision and offload for which machine, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from diptych.cli.usage import within
from diptych.errors import RequestError


def _option(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, show_default=False)


def plan(
    model: Annotated[
        str, _option("Checkpoint: a name such as pro-distill, a folder, or a hub id. Default: pro.")
    ] = "pro",
    gpus: Annotated[str | None, _option("Such as 8xH100-80 or 2xT4. Default: those found here.")] = None,
    geometry: Annotated[str | None, _option("WIDTHxHEIGHTxFRAMES. Default: from the checkpoint.")] = None,
    clips: Annotated[int, _option("How many clips are to be made. Default: 1.")] = 1,
    steps: Annotated[int | None, _option("Denoising steps. Default: from the checkpoint.")] = None,
    guidance: Annotated[float | None, _option("1 is off. Default: from the checkpoint.")] = None,
    audio: Annotated[bool, _option("With or without sound. Default: with.", "--audio/--no-audio")] = True,
    layout: Annotated[str | None, _option("Only this layout, such as cfg=2,ulysses=4.")] = None,
    precision: Annotated[str | None, _option("Only this one: exact, fp8 or fp8:steps=1,first=2,last=2.")] = None,
    text_precision: Annotated[str, _option("exact, 8bit or nf4: of the language model. Default: exact.")] = "exact",
    offload: Annotated[str | None, _option("Only none, model or block.")] = None,
    modulation: Annotated[str | None, _option("Only resident, or only tables.")] = None,
    memory: Annotated[str | None, _option("What may be used of each card, such as 22GiB. Default: all of it.")] = None,
    link: Annotated[float | None, _option("GB/s that a card sends to others at. Default: by the card.")] = None,
    rates: Annotated[Path | None, _option("Measured rates: what `diptych bench floors --json` wrote.")] = None,
    rows: Annotated[int, typer.Option(help="Ways to list.")] = 6,
    draw: Annotated[Path | None, _option("Draw who holds what to this PNG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Seconds and memory of every way to run a checkpoint on these GPUs, the best first. Needs no GPU."""
    from diptych.memory.precision import Precision
    from diptych.parallel.layout import Layout
    from diptych.planner import tell
    from diptych.planner.choices import Limits
    from diptych.planner.choices import plan as weigh
    from diptych.planner.draw import check_drawable
    from diptych.planner.machine import machine_here, machine_of
    from diptych.planner.options import budget_of, check_offload, check_precision, one_of, rates_for
    from diptych.planner.task import task_of

    within("--rows", rows, 1)
    if link is not None and not 0.001 <= link <= 1e6:
        raise RequestError("link", link, "GB/s from 0.001 to 1,000,000")
    machine = machine_here(link=link) if gpus is None else machine_of(gpus, link=link)
    limits = Limits(
        layout=None if layout is None else Layout.parse(layout),
        precision=None if precision is None else Precision.parse(precision),
        text_precision=one_of("text-precision", text_precision, ("exact", "8bit", "nf4")) or "exact",
        offload=one_of("offload", offload, ("none", "model", "block")),
        modulation=one_of("modulation", modulation, ("resident", "tables")),
        budget=budget_of(memory, machine),
    )
    check_offload(limits.offload, limits.layout)
    check_precision(limits.precision, machine)
    if draw is not None:
        check_drawable(draw)
    task = task_of(model, geometry, clips=clips, steps=steps, guidance=guidance, audio=audio)
    found = weigh(task, machine, limits, rates_for(machine, rates))
    if as_json:
        print(json.dumps(tell.as_json(found), indent=1))
    else:
        print(tell.text(found, rows))
    if draw is not None:
        if found.best is None:
            raise RequestError("draw", str(draw), "a plan that fits; nothing does")
        from diptych.planner.draw import save

        save(found, found.best, draw)
        if not as_json:
            print(f"drawn to {draw}")
    raise typer.Exit(0 if found.best is not None else 1)
