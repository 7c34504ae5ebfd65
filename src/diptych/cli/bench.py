"""`diptych bench`: what the machine can do, what Diptych does on it, and what stock diffusers does beside it."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True)

Model = Annotated[str, typer.Option(help="pro, lite, pro-distill, lite-distill, tiny or tiny-distill.")]
Size = Annotated[str, typer.Option(help="WIDTHxHEIGHTxFRAMES.")]
Blocks = Annotated[int | None, typer.Option(help="Only this many fused blocks.")]
Text = Annotated[int, typer.Option(help="Text tokens.")]
Repeats = Annotated[int, typer.Option(help="Timed calls; the median counts.", min=1)]
Against = Annotated[str | None, typer.Option(help="diffusers: the stock module in the same run.")]
Device = Annotated[str | None, typer.Option(help="cuda, cuda:1, cpu … Default: the GPU if there is one.")]
Json = Annotated[Path | None, typer.Option(help="Write everything measured to this file.")]


@app.callback()
def _bench() -> None:
    """Measure forwards, steps, clips, decodes and loading."""


@app.command()
def forward(
    model: Model = "pro",
    geometry: Size = "864x480x125",
    blocks: Blocks = None,
    text: Text = 200,
    repeats: Repeats = 3,
    against: Against = None,
    plain: Annotated[bool, typer.Option(help="Also without fused kernels.")] = False,
    floor: Annotated[bool, typer.Option(help="Measure this machine's ceilings first.")] = True,
    device: Device = None,
    json: Json = None,
) -> None:
    """One forward of the transformer with random weights, the floor of this machine, and where the time goes."""
    from diptych.bench.forward import bench_forward
    from diptych.bench.geometry import Geometry
    from diptych.bench.tables import forward_table

    result = bench_forward(
        model,
        Geometry.parse(geometry),
        device=_device(device),
        blocks=blocks,
        text_tokens=text,
        repeats=repeats,
        against=_rival(against),
        plain=plain,
        with_floor=floor,
    )
    typer.echo(forward_table(result))
    _write(json, result)


@app.command()
def attention(
    world: Annotated[list[int], typer.Option(help="Numbers of ranks; repeat it for several.", min=1)],
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Play one rank on one device, instead of running under torchrun.")
    ] = False,
    layout: Annotated[list[str] | None, typer.Option(help="Only these layouts, such as ring=2,ulysses=4.")] = None,
    link: Annotated[float, typer.Option(help="GB/s that a rank sends at, for the prediction.", min=0.001)] = 370.0,
    model: Model = "pro",
    geometry: Size = "864x480x125",
    blocks: Blocks = None,
    text: Text = 200,
    repeats: Repeats = 3,
    device: Device = None,
    json: Json = None,
) -> None:
    """What one rank of many computes and sends, and the step that gives: how a layout will scale."""
    from diptych.bench.geometry import Geometry
    from diptych.bench.layouts import bench_layouts, layouts_table
    from diptych.parallel import Layout

    result = bench_layouts(
        model,
        Geometry.parse(geometry),
        world,
        device=_device(device),
        blocks=blocks,
        text_tokens=text,
        repeats=repeats,
        link=link * 1e9,
        simulate=simulate,
        only=None if layout is None else [Layout.parse(text) for text in layout],
    )
    typer.echo(layouts_table(result))
    _write(json, result)


def _device(name: str | None) -> Any:
    import torch

    from diptych.errors import RequestError

    if name is None:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        return torch.device(name)
    except RuntimeError:
        raise RequestError("device", name, "write cuda, cuda:1 or cpu") from None


def _rival(name: str | None) -> str | None:
    from diptych.errors import RequestError

    if name not in (None, "diffusers"):
        raise RequestError("against", name, "only diffusers can be compared with")
    return name


def _write(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json_.dumps(result, indent=1))
        typer.echo(f"written to {path}")
