"""`diptych doctor`: what this machine has, and what to do about what it lacks."""

from __future__ import annotations

import json
from typing import Annotated

import typer


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
) -> None:
    """Look at GPUs, links, kernels, memory, disk, hub and ports. Exit status 0 if clips can be made here, else 1."""
    from diptych.engine import doctor as look

    checks = look.examine()
    if as_json:
        print(json.dumps(look.as_json(checks), indent=1))
    else:
        marks = {"ok": "ok  ", "note": "note", "bad": "BAD "}
        for check in checks:
            print(f"{marks[check.state]} {check.name}: {check.found}")
            if check.todo is not None:
                print(f"       {check.todo}")
        print(
            "\nClips can be made here." if look.can_generate(checks) else "\nClips cannot be made here: see BAD above."
        )
    raise typer.Exit(0 if look.can_generate(checks) else 1)
