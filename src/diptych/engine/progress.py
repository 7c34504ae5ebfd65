"""What an engine tells while it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

Stage = Literal["download", "load", "text", "image", "denoise", "decode", "mux"]


@dataclass(frozen=True)
class Progress:
    """One report: `done` of `total` units of `stage`, after `seconds` in it; `left` seconds to go in it, if known.

    In `denoise`, `preview()` returns the present estimate of the clean video latents (C, T, Y, X), float32 on the CPU;
    it costs a copy, so call it only when a picture is wanted, and only inside the callback.
    """

    stage: Stage
    done: int
    total: int
    seconds: float
    left: float | None = None
    preview: Callable[[], Tensor] | None = None


OnProgress = Callable[[Progress], None]
"""Called on the thread that generates. Raise `diptych.errors.Cancelled` in it to stop at this step."""
