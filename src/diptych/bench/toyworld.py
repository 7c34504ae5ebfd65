"""The toy world of the demo model: what can be asked for, and the rules that picture and sound follow.

One main shape moves over a lit wall with a darker floor strip; the sound belongs to the shape (its pitch) and to what
happens (a knock at each contact, a pitch that follows the height). The rules are few and exact, so that a generated
clip can be held against them by measurement; `tools/toyworld` renders them, `bench/score` measures them.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

WIDTH, HEIGHT, FPS, FRAMES = 96, 64, 24.0, 49
FLOOR = 54
"""First row of the floor strip; a bouncing shape touches it."""
FLOOR_SHADE = 0.6

SHAPE_COLORS: dict[str, tuple[float, float, float]] = {
    "red": (0.90, 0.12, 0.12),
    "orange": (0.98, 0.55, 0.08),
    "yellow": (0.98, 0.90, 0.15),
    "green": (0.20, 0.85, 0.25),
    "blue": (0.20, 0.45, 1.00),
    "purple": (0.65, 0.25, 0.95),
    "pink": (1.00, 0.55, 0.75),
    "white": (0.97, 0.97, 0.97),
}
BACKGROUND_COLORS: dict[str, tuple[float, float, float]] = {
    "black": (0.09, 0.09, 0.11),
    "gray": (0.50, 0.50, 0.52),
    "blue": (0.12, 0.25, 0.62),
    "green": (0.12, 0.42, 0.20),
    "brown": (0.42, 0.26, 0.14),
    "purple": (0.35, 0.16, 0.48),
    "teal": (0.08, 0.45, 0.48),
    "beige": (0.80, 0.70, 0.52),
}
PITCH_STEP = 44_100 / 512
"""Hertz, one period a mel frame. Every pitch is a multiple of it, so that a steady tone is a steady mel picture: from
any other, a vocoder, which sees mel frames only, could not make a steady tone."""
PITCH = {"circle": 5, "square": 7, "triangle": 9, "star": 12}
"""The pitch of each shape in steps: 431, 603, 775 and 1034 Hz, four to six semitones apart."""
PIXELS_PER_OCTAVE = 60.0
"""Rising by so many pixels doubles the pitch of a shape that moves up or down, rounded to whole steps."""

Motion = Literal["left", "right", "up", "down", "bouncing", "orbiting", "growing", "shrinking", "spinning", "still"]
MOTIONS: tuple[Motion, ...] = (
    "left",
    "right",
    "up",
    "down",
    "bouncing",
    "orbiting",
    "growing",
    "shrinking",
    "spinning",
    "still",
)
Sound = Literal["hum", "beep", "knock", "silent"]
Companion = tuple[str, str, Literal["left", "right"]]
"""A second, small, resting shape: its shape, its colour, and the upper corner that it stands in."""

_T = TypeVar("_T")
_MIN_CONTRAST = 0.36


@dataclass(frozen=True)
class Scene:
    """What a caption says: everything that is measured in a clip, nothing of what is left to chance."""

    shape: str
    color: str
    background: str
    motion: Motion
    sound: Sound
    companion: Companion | None = None

    @property
    def key(self) -> str:
        return "/".join((self.shape, self.color, self.background, self.motion, self.sound))

    @property
    def held_out(self) -> bool:
        """One combination in twelve is never shown in training, whatever the companion."""
        return zlib.crc32(self.key.encode()) % 12 == 0


@cache
def contrast(color: str, background: str) -> float:
    """Distance in RGB of a shape colour from a background colour, both on 0..1."""
    pair = np.subtract(SHAPE_COLORS[color], BACKGROUND_COLORS[background])
    return float(np.linalg.norm(pair))


def allowed(color: str, background: str) -> bool:
    """A shape never has the name of its background's colour, nor a colour that can hardly be told from it."""
    return color != background and contrast(color, background) >= _MIN_CONTRAST


def pick(rng: np.random.Generator, choices: Sequence[_T]) -> _T:
    """One of the choices, all equally likely."""
    return choices[int(rng.integers(len(choices)))]


def draw_scene(rng: np.random.Generator, *, held_out: bool = False) -> Scene:
    """One scene, from the training set or from the combinations held out of it."""
    shapes, colors, backgrounds = tuple(PITCH), tuple(SHAPE_COLORS), tuple(BACKGROUND_COLORS)
    while True:
        shape, motion = pick(rng, shapes), pick(rng, MOTIONS)
        color, background = pick(rng, colors), pick(rng, backgrounds)
        if not allowed(color, background) or (shape == "circle" and motion == "spinning"):
            continue
        chance = rng.random()
        sound: Sound
        if motion == "bouncing":
            sound = "knock" if chance < 0.9 else "silent"
        else:
            sound = "hum" if chance < 0.65 else "beep" if chance < 0.85 else "silent"
        companion: Companion | None = None
        if motion in ("left", "right", "bouncing", "spinning", "still") and rng.random() < 0.25:
            others = [c for c in colors if c != color and allowed(c, background)]
            sides: tuple[Literal["left", "right"], ...] = ("left", "right")
            companion = (pick(rng, shapes), pick(rng, others), pick(rng, sides))
        scene = Scene(shape, color, background, motion, sound, companion)
        if scene.held_out == held_out:
            return scene


def shade() -> npt.NDArray[np.float32]:
    """Light on wall and floor, (HEIGHT, WIDTH): brightest at the upper left, so that every place looks its own."""
    x = (np.arange(WIDTH, dtype=np.float32) + 0.5) / WIDTH
    y = (np.arange(HEIGHT, dtype=np.float32) + 0.5) / HEIGHT
    light = (1.12 - 0.16 * x[None, :] - 0.10 * y[:, None]).astype(np.float32)
    light[FLOOR:] *= FLOOR_SHADE
    return light.astype(np.float32)
