"""`diptych checkpoint`: write a tiny checkpoint, or look into any without loading it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(no_args_is_help=True)


@app.command()
def tiny(
    folder: Annotated[Path, typer.Argument(help="Where to write it.", metavar="DIR")],
    distilled: Annotated[bool, typer.Option("--distilled", help="PiFlow scheduler and tenfold heads.")] = False,
    seed: Annotated[int, typer.Option(help="Of every weight.")] = 0,
) -> None:
    """Write a complete checkpoint of a few megabytes with random weights, to try everything on."""
    from diptych.model.tiny import write_tiny

    print(write_tiny(folder, distilled, seed))


@app.command()
def inspect(
    name: Annotated[
        str, typer.Argument(help="A folder, a name such as lite-distill, or a hub id.", metavar="DIR_OR_NAME")
    ],
    revision: Annotated[str | None, typer.Option(help="Commit, branch or tag on the hub.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Show what a checkpoint holds; of one on the hub only headers and configs are fetched."""
    from diptych.model.checkpoint import Checkpoint

    found = Checkpoint.open(name, revision, weights=False).describe()
    if as_json:
        print(json.dumps(found, indent=2))
    else:
        _show(found)


def _show(found: dict[str, Any]) -> None:
    console = Console(highlight=False)
    facts = {
        "kind": f"{found['kind']}: {found['steps']} steps, guidance {found['guidance']:g}",
        "sound": f"yes, latents scaled by {found['audio_scaling_factor']:g}" if found["has_audio"] else "no",
        "first frame from an image": "yes" if found["has_image"] else "no",
        "folder": found["root"],
        "revision": found["revision"],
        "fingerprint": found["fingerprint"],
    }
    for label, value in facts.items():
        if value is not None:
            console.print(f"{label}: {value}", markup=False, soft_wrap=True)
    table = Table("component", "tensors", "parameters", "bytes", "stored as", box=None, pad_edge=False)
    for column in table.columns[1:4]:
        column.justify = "right"
    for part, values in found["components"].items():
        if values["tensors"]:
            numbers = [f"{values[key]:,}" for key in ("tensors", "parameters", "bytes")]
            table.add_row(part, *numbers, ", ".join(_share(*item) for item in values["dtypes"].items()))
    table.add_row("all", "", f"{found['parameters']:,}", f"{found['bytes']:,}")
    console.print()
    console.print(table)
    for part, values in found["components"].items():
        config = {key: value for key, value in values["config"].items() if not key.startswith("_")}
        console.print(f"\n{part}: {values['class']}\n{json.dumps(config)}", markup=False)


def _share(dtype: str, count: int) -> str:
    return f"{dtype} {count:,}"
