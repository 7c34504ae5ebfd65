"""`diptych tune`: what a checkpoint can be made to do faster, and what it costs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from diptych.cli.display import Display
from diptych.request import ClipRequest


def _option(help: str) -> Any:
    return typer.Option(help=help, show_default=False)


def tune(
    checkpoint: Annotated[str, typer.Argument(help="A folder, a hub id, or a name such as lite.")],
    prompt: Annotated[list[str] | None, _option("Prompt to try; repeat it. Default: two of ours.")] = None,
    cache: Annotated[list[str] | None, _option("Cache to try; repeat it. Default: each at three thresholds.")] = None,
    precision: Annotated[list[str] | None, _option("Precision to try beside exact, such as fp8; repeat it.")] = None,
    budget: Annotated[float, typer.Option(help="PSNR that the worst frame has to keep, dB.")] = 30.0,
    width: Annotated[int | None, _option("Pixels. Default: from the checkpoint.")] = None,
    height: Annotated[int | None, _option("Pixels. Default: from the checkpoint.")] = None,
    frames: Annotated[int | None, _option("Frames. Default: from the checkpoint.")] = None,
    steps: Annotated[int | None, _option("Denoising steps. Default: from the checkpoint.")] = None,
    seed: Annotated[int, typer.Option(help="Of the noise.")] = 0,
    device: Annotated[str | None, _option("cpu, cuda, cuda:1 … Default: the first GPU, else the CPU.")] = None,
    layout: Annotated[str | None, _option("How ranks share the clips, such as cfg=2,ulysses=4.")] = None,
    output: Annotated[Path | None, _option("Draw all of it as PNG.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every point as JSON.")] = False,
) -> None:
    """Try caches, thresholds, fewer steps and precisions, and tell what is fastest for each quality."""
    from diptych.bench import tune as bench
    from diptych.bench.calibrate import PROMPTS
    from diptych.engine.engine import open_checkpoint
    from diptych.engine.options import pick_cache
    from diptych.media.files import check_writable

    if output is not None:
        check_writable(output)
    with Display(quiet=quiet) as display:
        opened = open_checkpoint(checkpoint, display)
        base = ClipRequest("tuned", width=width, height=height, frames=frames, steps=steps, seed=seed)
        base.resolve(opened.defaults)
        for text in cache or ():
            pick_cache(text, opened)

        def on_point(point: bench.Point) -> None:
            display.restart()
            display.say(f"{point.command(checkpoint)}: {point.seconds:.2f} s, worst frame {point.psnr:.1f} dB")

        points = bench.tune(
            opened,
            base,
            prompt or PROMPTS[:2],
            precisions=precision or (),
            caches=cache or bench.CACHES,
            on_progress=display,
            on_point=on_point,
            device=device,
            layout=layout,
        )
    if output is not None:
        bench.plot(points, output, budget)
    if as_json:
        print(json.dumps([point.to_dict() | {"command": point.command(checkpoint)} for point in points]))
    else:
        print(bench.table(points, checkpoint, budget))
