"""`diptych show`: how a clip was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from diptych.cli.display import print_json, visible


def show(
    clip: Annotated[Path, typer.Argument(help="An MP4 that Diptych wrote.")],
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Print how a clip was made; `diptych generate --from CLIP` makes it again."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from diptych.media.mp4 import read_report

    made = read_report(clip)
    if as_json:
        print_json(made, indent=2)
        return
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    request = made.get("request")
    rows = made if not isinstance(request, dict) else request | {n: v for n, v in made.items() if n != "request"}
    for name, value in rows.items():
        told = json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)
        table.add_row(Text(visible(name)), Text(visible(told)))  # as it stands: what is in brackets is no markup
    Console().print(table)
