"""A clip's shape as settings write it; in a module of its own, so that an engine's start reads no settings."""

from __future__ import annotations


def warm_up_shape(text: str) -> tuple[int, int, int]:
    """`864x480x121` -> width, height, frames. Raises `ValueError` for another form."""
    parts = text.lower().split("x")
    if len(parts) != 3 or not all(p.isdigit() and int(p) > 0 for p in parts):
        raise ValueError(f"{text!r} is not WIDTHxHEIGHTxFRAMES, such as 864x480x121")
    width, height, frames = (int(p) for p in parts)
    return width, height, frames
