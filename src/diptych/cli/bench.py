"""`diptych bench`: what the machine can do, what Diptych does on it, and what stock diffusers does beside it."""

from __future__ import annotations

import json as json_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.cli.usage import within
from diptych.request import MAX_TEXT_TOKENS

if TYPE_CHECKING:
    from diptych.bench.geometry import Geometry

app = typer.Typer(no_args_is_help=True)

Model = Annotated[str, typer.Option(help="pro, lite, pro-distill, lite-distill, tiny or tiny-distill.")]
Size = Annotated[str, typer.Option(help="WIDTHxHEIGHTxFRAMES.")]
SizeOfModel = Annotated[
    str | None, typer.Option(help="WIDTHxHEIGHTxFRAMES. Default: 864x480x125, of the tiny models 96x64x9.")
]
Blocks = Annotated[int | None, typer.Option(help="Only this many fused blocks.")]
Text = Annotated[int, typer.Option(help="Text tokens.")]
Repeats = Annotated[int, typer.Option(help="Timed calls; the median counts.")]
Against = Annotated[str | None, typer.Option(help="diffusers: the stock module in the same run.")]
Device = Annotated[str | None, typer.Option(help="cuda, cuda:1, cpu … Default: the GPU if there is one.")]
Json = Annotated[Path | None, typer.Option(help="Write everything measured to this file.")]


@app.callback()
def _bench() -> None:
    """Measure forwards, steps, clips, decodes and loading."""


@app.command()
def forward(
    model: Model = "pro",
    geometry: SizeOfModel = None,
    blocks: Blocks = None,
    text: Text = 200,
    repeats: Repeats = 3,
    against: Against = None,
    plain: Annotated[bool, typer.Option(help="Also without fused kernels.")] = False,
    precision: Annotated[str, typer.Option(help="Then also in this one: fp8, or fp8:first=2,last=2.")] = "exact",
    floor: Annotated[bool, typer.Option(help="Measure this machine's ceilings first.")] = True,
    device: Device = None,
    json: Json = None,
) -> None:
    """One forward of the transformer with random weights, the floor of this machine, and where the time goes."""
    from diptych.bench.forward import bench_forward
    from diptych.bench.tables import forward_table

    within("--repeats", repeats, 1)
    within("--text", text, 1, MAX_TEXT_TOKENS)

    result = bench_forward(
        model,
        _geometry(geometry, model),
        device=_device(device),
        blocks=blocks,
        text_tokens=text,
        repeats=repeats,
        against=_rival(against),
        plain=plain,
        precision=precision,
        with_floor=floor,
    )
    typer.echo(forward_table(result))
    _write(json, result)


@app.command()
def floors(
    geometry: Size = "864x480x125",
    tiny: Annotated[bool, typer.Option("--tiny", help="At the width of the tiny model.")] = False,
    device: Device = None,
    json: Json = None,
) -> None:
    """What this GPU can do: products, attention, copies, the way from the host; for `diptych plan --rates`."""
    from diptych.bench.floors import rates
    from diptych.bench.forward import machine
    from diptych.bench.geometry import Geometry, config_named
    from diptych.engine.options import pick_dtype

    where = _device(device)
    models = {name: config_named(name) for name in (("tiny",) if tiny else ("pro", "lite"))}
    result = rates(Geometry.parse(geometry), where, pick_dtype(None, where), models) | {"machine": machine(where)}
    for size, rate in result["attention_tflops"].items():
        typer.echo(f"self-attention, heads of {size}: {rate:.3g} TFLOP/s by {result['attention_kernels'][size]}")
    typer.echo(f"products: {result['linear_tflops']:.3g} TFLOP/s")
    typer.echo(f"copies: {result['copy_TBps']:.3g} TB/s; from the host: {result['host_GBps']:.3g} GB/s")
    _write(json, result)


@app.command()
def attention(
    world: Annotated[list[int], typer.Option(help="Numbers of ranks; repeat it for several.")],
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Play one rank on one device, instead of running under torchrun.")
    ] = False,
    layout: Annotated[list[str] | None, typer.Option(help="Only these layouts, such as ring=2,ulysses=4.")] = None,
    link: Annotated[float, typer.Option(help="GB/s that a rank sends at, for the prediction.")] = 370.0,
    model: Model = "pro",
    geometry: SizeOfModel = None,
    blocks: Blocks = None,
    text: Text = 200,
    repeats: Repeats = 3,
    device: Device = None,
    json: Json = None,
) -> None:
    """What one rank of many computes and sends, and the step that gives: how a layout will scale."""
    from diptych.bench.layouts import bench_layouts, layouts_table
    from diptych.parallel import Layout

    within("--repeats", repeats, 1)
    within("--text", text, 1, MAX_TEXT_TOKENS)
    for ranks in world:
        within("--world", ranks, 1)
    within("--link", link, 0.001)

    result = bench_layouts(
        model,
        _geometry(geometry, model),
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


@app.command()
def step(
    model: Model = "pro",
    geometry: SizeOfModel = None,
    blocks: Blocks = None,
    text: Text = 200,
    precision: Annotated[str, typer.Option(help="exact, fp8 or fp8:first=2,last=2.")] = "exact",
    repeats: Repeats = 3,
    device: Device = None,
    json: Json = None,
) -> None:
    """One step of the sampler with random weights: two forwards with guidance, one for distilled models."""
    from diptych.bench.step import bench_step
    from diptych.bench.tables import seconds_table

    within("--repeats", repeats, 1)
    within("--text", text, 1, MAX_TEXT_TOKENS)

    size, where = _geometry(geometry, model), _device(device)
    result = bench_step(
        model, size, device=where, blocks=blocks, text_tokens=text, repeats=repeats, precision=precision
    )
    typer.echo(seconds_table(result))
    _write(json, result)


@app.command()
def decode(
    geometry: Size = "864x480x125",
    budget: Annotated[float | None, typer.Option(help="GiB that decoding may take.")] = None,
    repeats: Repeats = 3,
    against: Against = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="The VAE of the tiny checkpoint.")] = False,
    device: Device = None,
    json: Json = None,
) -> None:
    """The video VAE with random weights: latents of a clip to frames."""
    from diptych.bench.decode import bench_decode
    from diptych.bench.geometry import Geometry
    from diptych.bench.tables import seconds_table

    within("--repeats", repeats, 1)
    if budget is not None:
        within("--budget", budget, 0.1)

    result = bench_decode(
        Geometry.parse(geometry),
        device=_device(device),
        tiny=tiny,
        budget=None if budget is None else int(budget * 2**30),
        repeats=repeats,
        against=_rival(against),
    )
    typer.echo(seconds_table(result))
    _write(json, result)


Checkpoint = Annotated[str, typer.Argument(help="A folder, a hub id, or a name such as lite-distill.")]


@app.command()
def clip(
    checkpoint: Checkpoint,
    geometry: Size = "864x480x125",
    steps: Annotated[int | None, typer.Option(help="Default: from the checkpoint.")] = None,
    precision: Annotated[str, typer.Option(help="exact, fp8 or fp8:steps=1,first=2,last=2.")] = "exact",
    modulation: Annotated[str, typer.Option(help="resident or tables.")] = "resident",
    repeats: Repeats = 1,
    device: Device = None,
    json: Json = None,
) -> None:
    """Whole clips from a checkpoint, stage by stage."""
    from diptych.bench.clip import bench_clip
    from diptych.bench.geometry import Geometry
    from diptych.bench.tables import seconds_table

    within("--repeats", repeats, 1)

    size = Geometry.parse(geometry)
    how: dict[str, Any] = {"precision": precision, "modulation": modulation}
    result = bench_clip(checkpoint, size, device=device, steps=steps, repeats=repeats, **how)
    typer.echo(seconds_table(result))
    _write(json, result)


@app.command()
def load(
    checkpoint: Checkpoint,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: by the device.")] = None,
    repeats: Repeats = 2,
    device: Device = None,
    json: Json = None,
) -> None:
    """A checkpoint's transformer from its files to the device: seconds and bytes a second."""
    from diptych.bench.load import bench_load
    from diptych.bench.tables import load_table
    from diptych.engine.engine import open_checkpoint
    from diptych.engine.options import pick_dtype

    within("--repeats", repeats, 1)

    where = _device(device)
    opened = open_checkpoint(checkpoint, None)
    result = bench_load(opened, device=where, dtype=pick_dtype(dtype, where), repeats=repeats)
    typer.echo(load_table(result))
    _write(json, result)


def _geometry(given: str | None, model: str) -> Geometry:
    """The tiny models are for a look at what a command prints: a real clip's size keeps a CPU for many minutes."""
    from diptych.bench.geometry import Geometry

    return Geometry.parse(given or ("96x64x9" if model.startswith("tiny") else "864x480x125"))


def _device(name: str | None) -> Any:
    from diptych.engine.options import pick_device

    return pick_device(name)


def _rival(name: str | None) -> str | None:
    from diptych.errors import RequestError

    if name not in (None, "diffusers"):
        raise RequestError("against", name, "only diffusers can be compared with")
    return name


def _write(path: Path | None, result: dict[str, Any]) -> None:
    if path is not None:
        from diptych.media.files import replacing

        with replacing(path) as file:
            file.write_text(json_.dumps(result, indent=1))
        typer.echo(f"written to {path}")
