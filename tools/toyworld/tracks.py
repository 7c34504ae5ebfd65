"""What chance decides: where the shapes of a scene are in every frame. B clips, F frames; all arrays are float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diptych.bench.toyworld import (
    BACKGROUND_COLORS,
    FLOOR,
    FRAMES,
    PITCH,
    PIXELS_PER_OCTAVE,
    SHAPE_COLORS,
    WIDTH,
    Scene,
)

Array = npt.NDArray[np.float32]

SHAPES = tuple(PITCH)
BOTTOM = {"circle": 1.0, "square": 0.88, "triangle": 0.68, "star": 1.15}
"""Lowest point of each upright shape below its centre, in units of its radius."""
SIDE = {"circle": 1.0, "square": 0.88, "triangle": 1.18, "star": 1.35}
"""Half the width, likewise."""
COMPANION_RADIUS = 5.0
COMPANION_AT = {"left": (13.0, 10.0), "right": (83.0, 10.0)}


@dataclass(frozen=True)
class Track:
    """One clip. x, y, radius, angle: (F,) pixels and radians; contacts: frames at which it touches the floor."""

    scene: Scene
    x: Array
    y: Array
    radius: Array
    angle: Array
    contacts: tuple[float, ...]
    pace: str | None

    def cut(self, frames: int) -> Track:
        """The first `frames` frames."""
        contacts = tuple(c for c in self.contacts if c < frames)
        parts = (getattr(self, name)[:frames] for name in ("x", "y", "radius", "angle"))
        return Track(self.scene, *parts, contacts, self.pace)


def draw_track(scene: Scene, rng: np.random.Generator, frames: int = FRAMES) -> Track:
    """Draw start, size and speed for a scene so that the shape stays inside the picture for at least 49 frames."""
    length = max(frames, FRAMES) - 1
    t = np.arange(length + 1, dtype=np.float64)
    pace = (None, "slow", "fast")[int(rng.choice(3, p=(0.6, 0.2, 0.2)))]
    if scene.motion in ("growing", "shrinking", "still"):
        pace = None

    def speed(low: float, high: float) -> float:
        middle = (low + high) / 2
        spread = {"slow": (low, middle - 0.1 * middle), "fast": (middle + 0.1 * middle, high), None: (low, high)}
        return float(rng.uniform(*spread[pace]))

    def between(low: float, high: float) -> float:
        return float(rng.uniform(low, max(low, high)))

    shape, motion = scene.shape, scene.motion
    side, bottom = SIDE[shape], BOTTOM[shape]
    r = between(7.5, 8.5) if motion in ("up", "down") else between(9, 12)
    if motion == "orbiting":
        r = between(7, 8.5)
    # A resting companion in the corner keeps the main shape below it.
    high = 19.0 if scene.companion else 2.0
    x, y = np.full_like(t, between(30, WIDTH - 30)), np.full_like(t, between(high + 1.4 * r, 52 - bottom * r))
    radius, angle = np.full_like(t, r), np.zeros_like(t)
    contacts: list[float] = []
    edge = side * r + 2
    if motion in ("left", "right"):
        step = min(speed(0.55, 1.25), (WIDTH - 2 * edge) / length)
        start = between(edge, WIDTH - edge - step * length)
        x = start + step * t if motion == "right" else WIDTH - start - step * t
    elif motion in ("up", "down"):
        top, low = 1.4 * r + 1, 52 - bottom * r
        step = min(speed(0.34, 0.66), (low - top) / length)
        start = between(top, low - step * length)
        y = start + step * t if motion == "down" else low - (start - top) - step * t
    elif motion == "bouncing":
        period = {"slow": between(17, 20), "fast": between(12, 14), None: between(12, 20)}[pace]
        apex = between(17, min(27, FLOOR - high - (bottom + 1.4) * r))
        first = between(0.3, 0.6)
        phase = (t / period + first) % 1
        y = FLOOR - bottom * r - apex * 4 * phase * (1 - phase)
        contacts = [c for k in range(1, 2 + int(length / period)) if (c := (k - first) * period) <= length]
    elif motion == "orbiting":
        reach = between(13, min(17, 25.5 - bottom * r))
        turn = 2 * np.pi / {"slow": between(40, 46), "fast": between(26, 30), None: between(26, 46)}[pace]
        turn *= 1 if rng.random() < 0.5 else -1
        start = between(0, 2 * np.pi)
        middle = between(36, WIDTH - 36)
        x, y = middle + reach * 1.25 * np.cos(start + turn * t), 28 + reach * np.sin(start + turn * t)
    elif motion in ("growing", "shrinking"):
        small, big = between(5, 6.5), between(13, 15)
        ramp = t / length if motion == "growing" else 1 - t / length
        radius = small + (big - small) * ramp
        y = np.full_like(t, between(24, 30))
    elif motion == "spinning":
        turn = 2 * np.pi / {"slow": between(42, 54), "fast": between(26, 32), None: between(26, 54)}[pace]
        angle = (turn if rng.random() < 0.5 else -turn) * t
        y = np.full_like(t, between(max(17.0, high + 1.5 * r), 36))
    parts = (a.astype(np.float32) for a in (x, y, radius, angle))
    return Track(scene, *parts, tuple(contacts), pace).cut(frames)


@dataclass(frozen=True)
class Batch:
    """Tracks side by side. shape: int (B,); color, background: (B, 3); the rest (B, F).

    The companion has radius 0 where there is none; `contacts` is padded with -1000.
    """

    shape: npt.NDArray[np.int64]
    color: Array
    background: Array
    x: Array
    y: Array
    radius: Array
    angle: Array
    other_shape: npt.NDArray[np.int64]
    other_color: Array
    other_at: Array
    other_radius: Array
    pitch: Array
    sound: npt.NDArray[np.int64]
    contacts: Array


SOUNDS = ("hum", "beep", "knock", "silent")
MAX_CONTACTS = 6


def collate(tracks: Sequence[Track]) -> Batch:
    """Put tracks of equal length side by side."""
    scenes = [track.scene for track in tracks]
    others = [s.companion or ("circle", "white", "left") for s in scenes]
    contacts = np.full((len(tracks), MAX_CONTACTS), -1000.0, np.float32)
    for row, track in zip(contacts, tracks, strict=True):
        row[: len(track.contacts)] = track.contacts

    def rows(values: list[object]) -> Array:
        return np.asarray(values, dtype=np.float32)

    return Batch(
        shape=np.asarray([SHAPES.index(s.shape) for s in scenes]),
        color=rows([SHAPE_COLORS[s.color] for s in scenes]),
        background=rows([BACKGROUND_COLORS[s.background] for s in scenes]),
        x=np.stack([t.x for t in tracks]),
        y=np.stack([t.y for t in tracks]),
        radius=np.stack([t.radius for t in tracks]),
        angle=np.stack([t.angle for t in tracks]),
        other_shape=np.asarray([SHAPES.index(o[0]) for o in others]),
        other_color=rows([SHAPE_COLORS[o[1]] for o in others]),
        other_at=rows([COMPANION_AT[o[2]] for o in others]),
        other_radius=rows([COMPANION_RADIUS if s.companion else 0.0 for s in scenes]),
        pitch=_pitches(tracks),
        sound=np.asarray([SOUNDS.index(s.sound) for s in scenes]),
        contacts=contacts,
    )


def _pitches(tracks: Sequence[Track]) -> Array:
    """Pitch in steps at every frame, before rounding: the shape's own, moved by height gained if it goes up or down."""
    rows = []
    for track in tracks:
        pitch = np.full(len(track.y), PITCH[track.scene.shape], np.float32)
        if track.scene.motion in ("up", "down"):
            pitch *= 2 ** ((track.y[0] - track.y) / PIXELS_PER_OCTAVE)
        rows.append(pitch)
    return np.stack(rows)
