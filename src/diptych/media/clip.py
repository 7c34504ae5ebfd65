"""A finished clip: pictures, sound, and the report of how it was made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class Clip:
    """frames: uint8 (T, H, W, 3); audio: float32 (samples,) in [-1, 1], or None; fps: frames a second.

    report: what was asked and what was run: request, seed, layout, precision, forwards, seconds per stage.
    """

    frames: npt.NDArray[np.uint8]
    audio: npt.NDArray[np.float32] | None
    fps: float
    sample_rate: int = 44_100
    report: dict[str, Any] = field(default_factory=dict)
