"""What of a command line cannot be taken, each in one sentence: numbers out of range, and what typer itself refuses."""

from __future__ import annotations

import math
from typing import Any

import typer

from diptych.errors import RequestError, UserError

UsageError: Any = typer.BadParameter.__mro__[1]
"""Of every refusal of typer's own; which module has it depends on the release."""

KINDS = {"int": "a whole number", "float": "a number"}


def within(option: str, value: float, least: float, most: float = math.inf) -> None:
    """Raise `RequestError` for a number that is not `least` to `most`, or has no end."""
    if not (least <= value <= most and math.isfinite(value)):
        kind = KINDS["int" if isinstance(value, int) else "float"]
        accepted = f"{kind} from {least:,} on" if most == math.inf else f"{kind} from {least:,} to {most:,}"
        raise RequestError(option, value, accepted)


def told(error: Any) -> UserError:
    """A refusal of typer's as one of ours."""
    option = max(getattr(getattr(error, "param", None), "opts", None) or [""], key=len)
    # What could not be read as a number, where typer leaves the work to pydantic; click tells it in words alone.
    failed = error.__cause__.errors()[0] if hasattr(error.__cause__, "errors") else {}
    kind = KINDS.get(str(failed.get("type")).partition("_")[0])
    if option and kind is not None:
        return RequestError(option, failed["input"], kind)
    words = " ".join(str(error.format_message()).split()).rstrip(".")
    where = "" if error.ctx is None else f"; {error.ctx.command_path} --help tells what there is"
    return UserError(f"{words[:1].lower()}{words[1:]}{where}.")
