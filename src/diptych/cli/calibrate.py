"""`diptych calibrate`: measure what the step caches have to know about a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from diptych.cli.display import Display
from diptych.request import ClipRequest


def _option(help: str) -> Any:
    return typer.Option(help=help, show_default=False)


def calibrate(
    checkpoint: Annotated[str, typer.Argument(help="A folder, a hub id, or a name such as lite.")],
    prompt: Annotated[list[str] | None, _option("Prompt to measure on; repeat it. Default: five of ours.")] = None,
    image: Annotated[Path | None, _option("Picture to start from: measures image to video.")] = None,
    width: Annotated[int | None, _option("Pixels. Default: from the checkpoint.")] = None,
    height: Annotated[int | None, _option("Pixels. Default: from the checkpoint.")] = None,
    frames: Annotated[int | None, _option("Frames. Default: from the checkpoint.")] = None,
    steps: Annotated[int | None, _option("Denoising steps. Default: from the checkpoint.")] = None,
    guidance: Annotated[float | None, _option("Default: from the checkpoint.")] = None,
    audio: Annotated[bool, typer.Option("--audio/--no-audio", help="With or without sound.")] = True,
    sigma_grid: Annotated[str, typer.Option(help="diffusers or native.")] = "diffusers",
    seed: Annotated[int, typer.Option(help="Of the noise.")] = 0,
    dtype: Annotated[str | None, _option("float32, bfloat16 or float16. Default: by the device.")] = None,
    device: Annotated[str | None, _option("cpu, cuda, cuda:1 … Default: the first GPU, else the CPU.")] = None,
    layout: Annotated[str | None, _option("How ranks share the clips, such as cfg=2,ulysses=4.")] = None,
    adopt: Annotated[Path | None, _option("Use this file, measured on another checkpoint, instead.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the file's path and what is in it.")] = False,
) -> None:
    """Make a few clips, nothing left out, and keep what magcache and teacache need, for this checkpoint alone.

    Stopped, it goes on where it was; one run for each picture size, mode and number of steps that matters to you.
    """
    from diptych.bench import calibrate as bench
    from diptych.engine.engine import Engine, open_checkpoint
    from diptych.engine.options import pick_cache
    from diptych.sampling.caches.calibration import calibration_path

    with Display(quiet=quiet) as display:
        opened = open_checkpoint(checkpoint, display)
        pick_cache("record", opened)  # a distilled checkpoint is refused before a weight is read
        if adopt is not None:
            calibration = bench.adopt(opened, adopt)
        else:
            base = ClipRequest(
                "measured",
                image=image,
                width=width,
                height=height,
                frames=frames,
                steps=steps,
                guidance=guidance,
                audio=audio,
                sigma_grid=sigma_grid,  # type: ignore[arg-type]  # the request says what it takes
                seed=seed,
            )
            base.resolve(opened.defaults)

            def on_clip(done: int, total: int, before: bool) -> None:
                display.restart()
                display.say(f"{done} of {total}: {'measured before' if before else 'measured'}")

            with Engine.load(opened, dtype=dtype, device=device, layout=layout, on_progress=display) as engine:
                calibration = bench.calibrate(engine, base, prompt or bench.PROMPTS, on_step=display, on_clip=on_clip)
        path = calibration_path(calibration.fingerprint)
        display.say(f"{path}: {len(calibration.measured)} clips")
    if as_json:
        settings = [str(setting) for setting in dict.fromkeys(one.setting for one in calibration.measured)]
        print(json.dumps({"file": str(path), "clips": len(calibration.measured), "settings": settings}))
