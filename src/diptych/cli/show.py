"""`diptych show`: how a clip was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer


def show(
    clip: Annotated[Path, typer.Argument(help="An MP4 that Diptych wrote.")],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Print how a clip was made; `diptych generate --from CLIP` makes it again."""
    from rich.console import Console
    from rich.table import Table

    from diptych.media.mp4 import read_report

    made = read_report(clip)
    if as_json:
        print(json.dumps(made, ensure_ascii=False, indent=2))
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in made.get("request", {}).items():
        table.add_row(name, str(value))
    for name, value in made.items():
        if name != "request":
            table.add_row(name, json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value))
    Console().print(table)
