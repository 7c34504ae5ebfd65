"""`diptych demo`: the shortest way to see and hear something."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from diptych.cli.display import Display
from diptych.cli.signals import stoppable
from diptych.request import ClipRequest

PROMPT = "a red circle bounces on a blue floor"


def demo(
    output: Annotated[Path, typer.Option(help="The clip.")] = Path("demo.mp4"),
    sheet: Annotated[Path, typer.Option(help="Its frames and its sound on one picture.")] = Path("demo.png"),
    prompt: Annotated[str, typer.Option(help="What to show.")] = PROMPT,
    seed: Annotated[int, typer.Option(help="Same seed, same clip.")] = 1,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Make a clip with the small model that is built in, and a contact sheet of it."""
    from diptych.engine.engine import Engine
    from diptych.media.files import check_apart, check_writable
    from diptych.media.sheets import contact_sheet, save_png

    check_writable(output)
    check_writable(sheet)
    check_apart(output, sheet)
    request = ClipRequest(prompt, seed=seed)
    with stoppable(), Display(quiet=quiet) as display:
        with Engine.load("demo", on_progress=display) as engine:
            clip = engine.generate(request, on_step=display)
        if clip is not None:
            clip.save(output)
            save_png(sheet, contact_sheet(clip))
            display.say(f"clip: {output.absolute()}\nsheet: {sheet.absolute()}")
