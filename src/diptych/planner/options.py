"""What a user fixes of a plan, read and refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TypeVar

from diptych.errors import RequestError
from diptych.memory.footprint import GIB, Offload
from diptych.memory.precision import Precision
from diptych.parallel.layout import Layout
from diptych.planner.cards import CARDS
from diptych.planner.machine import Machine
from diptych.planner.rates import Rates

T = TypeVar("T", bound=str)
MOST_BYTES = 1e6 * 1024**4
"""Sizes beyond it are slips; so are numbers that no float holds."""


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
    size = 0.0
    if match is not None and not isinstance(text, bool):
        unit = match[2] or "B"
        size = float(match[1]) * (1024 if "i" in unit else 1000) ** "BKMGT".index(unit[0])
    if not 1 <= size < MOST_BYTES:
        raise RequestError(name, text, "a size such as 6GiB or 512MiB, from 1 byte to 1 million TiB")
    return int(size)


def check_offload(offload: Offload | None, layout: Layout | None) -> None:
    """Raise `RequestError` for an offload mode that a layout cannot have."""
    if offload is None or layout is None:
        return
    if offload != "none" and layout.shard > 1:
        raise RequestError("offload", offload, f"layout {layout} leaves each rank its share of the weights; use none")
    if offload == "block" and layout.pipeline > 1:
        raise RequestError("offload", offload, f"layout {layout} runs each block for every patch; use none or model")


def check_precision(precision: Precision | None, machine: Machine) -> None:
    """Raise `RequestError` for fp8 on cards that it does not run on."""
    if precision is not None and precision.kind == "fp8" and not machine.card.hopper:
        hopper = ", ".join(card.name for card in CARDS.values() if card.hopper)
        raise RequestError(
            "precision", str(precision), f"exact on {machine.card.name}; fp8 takes a Hopper GPU ({hopper})"
        )


def rates_for(machine: Machine, file: Path | None) -> Rates:
    """By the card, or with what was measured. Raises `RequestError` for a file that cannot be read."""
    rates = Rates.of(machine.card, machine.link)
    if file is None:
        return rates
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no JSON"
        raise RequestError("rates", str(file), f"a file that `diptych bench floors --json` wrote ({why})") from None
    return rates.with_measured(found if isinstance(found, dict) else {}, str(file))
