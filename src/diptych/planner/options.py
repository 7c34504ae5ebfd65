"""What a user fixes of a plan, read and refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TypeVar

from diptych.errors import RequestError
from diptych.planner.cards import GIB
from diptych.planner.machine import Machine
from diptych.planner.rates import Rates

T = TypeVar("T", bound=str)


def one_of(field: str, value: str | None, choices: tuple[T, ...]) -> T | None:
    """`value` if it is among `choices`. Raises `RequestError`."""
    if value is None:
        return None
    found = next((choice for choice in choices if choice == value), None)
    if found is None:
        raise RequestError(field, value, "one of " + ", ".join(choices))
    return found


def budget_of(text: str | None, machine: Machine) -> int | None:
    """Bytes of each card that may be used. Raises `RequestError` for more than it has."""
    budget = pick_bytes("memory", text)
    if budget is not None and budget > machine.card.memory * GIB:
        raise RequestError("memory", text, f"at most the {machine.card.memory:g} GiB of {machine.card.name}")
    return budget


def pick_bytes(name: str, text: str | int | None) -> int | None:
    """A size in bytes from a number or a text such as `6GiB`, `512MiB`, `6GB`. Raises `RequestError` for another."""
    if text is None:
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?B|B)?", str(text).strip())
    if match is None or isinstance(text, bool) or float(match[1]) <= 0:
        raise RequestError(name, text, "a size such as 6GiB or 512MiB")
    unit = match[2] or "B"
    power = "BKMGT".index(unit[0])
    return int(float(match[1]) * (1024 if "i" in unit else 1000) ** power)


def rates_for(machine: Machine, file: Path | None) -> Rates:
    """By the card, or with what was measured. Raises `RequestError` for a file that cannot be read."""
    rates = Rates.of(machine.card, machine.link)
    if file is None:
        return rates
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise RequestError("rates", str(file), f"a file that `diptych bench floors --json` wrote ({why})") from None
    return rates.with_measured(found if isinstance(found, dict) else {}, str(file))
