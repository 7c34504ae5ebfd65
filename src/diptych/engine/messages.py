"""What an engine and its rank processes say to each other; every message is one of these."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diptych.engine.order import Order
from diptych.engine.progress import Progress
from diptych.media.clip import Clip


@dataclass(frozen=True)
class Generate:
    """To all ranks: make these clips together. `progress`: the first rank should tell how it goes; `frames`: and send
    frames as soon as they are decoded.
    """

    orders: list[Order]
    progress: bool
    frames: bool


@dataclass(frozen=True)
class Cancel:
    """To the first rank: stop the present job after this step, on all ranks at the same one."""


@dataclass(frozen=True)
class Close:
    """To all ranks: end."""


@dataclass(frozen=True)
class Ready:
    """From each rank: its weights are loaded."""


@dataclass(frozen=True)
class Told:
    """From the first rank: progress; its preview, if any, is already a picture's latents."""

    progress: Progress


@dataclass(frozen=True)
class Frames:
    """From the first rank: the next frames (N, H, W, 3) of the clip of this number."""

    clip: int
    frames: npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Finished:
    """From the first rank: the clips, whole."""

    clips: list[Clip]


@dataclass(frozen=True)
class Failed:
    """From any rank: it could not go on.

    error: what the caller is to see: a `UserError`, `Cancelled`, or a `RankError` with this rank's traceback.
    whole: every rank is back waiting for the next job; else the ranks have to be started anew.
    """

    error: BaseException
    whole: bool


ToRank = Generate | Cancel | Close
FromRank = Ready | Told | Frames | Finished | Failed
