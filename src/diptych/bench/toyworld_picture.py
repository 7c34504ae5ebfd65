"""Reading the picture of a toy-world clip from its pixels: colours, shape, motion, contacts with the floor.

The wall's light is known (`toyworld.shade`), so the background colour is one median, and every pixel's share of the
shape's colour is a projection on the line from background to shape colour. Nothing is learned, all is measured.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from diptych.bench.toyworld import BACKGROUND_COLORS, FLOOR, PITCH, SHAPE_COLORS, shade

Array = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

_COLORS = np.array(list(SHAPE_COLORS.values()))
_MIN_AREA = 20


@dataclass(frozen=True)
class PictureReading:
    """Names are `None` where nothing of the kind was found. x, y, bottom: (T,) pixels, NaN in frames without a shape;
    area: (T,) pixels; contacts: frames at which the shape touches the floor, or turns as if it did.
    """

    background: str
    color: str | None
    shape: str | None
    motion: str | None
    x: Array
    y: Array
    bottom: Array
    area: Array
    contacts: Array


def read_picture(frames: npt.NDArray[np.uint8]) -> PictureReading:
    """frames: uint8 (T, 64, 96, 3)."""
    pixels = frames.astype(np.float64) / 255
    light = shade().astype(np.float64)[..., None]
    wall = np.median((pixels / light).reshape(-1, 3), axis=0)
    background = _nearest(wall, BACKGROUND_COLORS)
    scenery = wall * light
    away = np.linalg.norm(pixels - scenery, axis=-1)
    color = _main_color(pixels[away > 0.3])
    T = len(frames)
    nothing = np.full(T, np.nan)
    if color is None:
        return PictureReading(background, None, None, None, nothing, nothing, nothing, np.zeros(T), np.array([]))
    share = _share(pixels, scenery, np.array(SHAPE_COLORS[color]))
    mask = _largest(share > 0.5)
    track = _Track.of(np.where(mask, share, 0.0), mask)
    if (track.area >= _MIN_AREA).mean() < 0.5:
        return PictureReading(background, color, None, None, track.x, track.y, track.bottom, track.area, np.array([]))
    lobes, phase = _lobes(mask, track)
    shape = _shape(lobes)
    contacts = _contacts(track)
    motion = _motion(track, shape, phase, contacts)
    return PictureReading(background, color, shape, motion, track.x, track.y, track.bottom, track.area, contacts)


@dataclass(frozen=True)
class _Track:
    x: Array
    y: Array
    bottom: Array
    area: Array

    @classmethod
    def of(cls, share: Array, mask: Mask) -> _Track:
        """Centre of mass, area, and lowest row of the shape in each frame, with sub-pixel weights."""
        weight = np.clip(share, 0, 1)
        area = weight.sum(axis=(1, 2))
        safe = np.where(area > 0, area, np.nan)
        ys, xs = np.arange(mask.shape[1]) + 0.5, np.arange(mask.shape[2]) + 0.5
        seen: npt.NDArray[np.bool_] = np.any(mask, axis=2)
        bottom = np.where(np.any(seen, axis=1), mask.shape[1] - seen[:, ::-1].argmax(axis=1), np.nan)
        x = (weight.sum(axis=1) * xs).sum(axis=1) / safe
        y = (weight.sum(axis=2) * ys).sum(axis=1) / safe
        return cls(x, y, bottom.astype(np.float64), area)


def _nearest(color: Array, names: dict[str, tuple[float, float, float]]) -> str:
    return min(names, key=lambda name: float(np.linalg.norm(color - np.array(names[name]))))


def _main_color(pixels: Array) -> str | None:
    """The shape colour that most of these pixels are near; mixed pixels of an edge are near none."""
    if len(pixels) == 0:
        return None
    distance = np.linalg.norm(pixels[:, None] - _COLORS, axis=-1)
    near = distance.argmin(axis=1)[distance.min(axis=1) < 0.25]
    if len(near) == 0:
        return None
    return list(SHAPE_COLORS)[int(np.bincount(near, minlength=len(_COLORS)).argmax())]


def _share(pixels: Array, scenery: Array, color: Array) -> Array:
    """How far each pixel lies on the way from the scenery to the shape's colour; 0 where it lies off that way."""
    way = color - scenery
    length = (way**2).sum(axis=-1)
    share = ((pixels - scenery) * way).sum(axis=-1) / length
    off = np.linalg.norm(pixels - scenery - share[..., None] * way, axis=-1) / np.sqrt(length)
    return np.where(off < 0.35, np.clip(share, 0, 1.2), 0.0)


def _largest(mask: Mask) -> Mask:
    """Per frame the blob around the densest place of the mask, found by growing from it."""
    padded = np.pad(mask, ((0, 0), (1, 1), (1, 1)))
    dense = padded.astype(np.int32)
    for axis in (1, 2):
        total = np.cumsum(np.pad(dense, [(0, 0) if a != axis else (5, 4) for a in range(3)]), axis=axis)
        dense = np.take(total, np.arange(9, total.shape[axis]), axis) - np.take(
            total, np.arange(0, total.shape[axis] - 9), axis
        )
    dense = np.where(padded, dense, 0)
    grown = np.zeros_like(padded)
    start = dense.reshape(len(mask), -1).argmax(axis=1)
    grown.reshape(len(mask), -1)[np.arange(len(mask)), start] = True
    grown &= padded
    while True:
        wider = grown.copy()
        wider[:, 1:] |= grown[:, :-1]
        wider[:, :-1] |= grown[:, 1:]
        wider[:, :, 1:] |= grown[:, :, :-1]
        wider[:, :, :-1] |= grown[:, :, 1:]
        wider &= padded
        if (wider == grown).all():
            return grown[:, 1:-1, 1:-1]
        grown = wider


def _lobes(mask: Mask, track: _Track) -> tuple[Array, Array]:
    """Strength (T, 4) and phase (T, 4) of the 2nd..5th angular harmonic of the outline's distance from the centre."""
    angles = np.linspace(0, 2 * np.pi, 120, endpoint=False)
    reach = np.arange(0.25, 34, 0.25)
    strength, phase = np.zeros((len(mask), 4)), np.zeros((len(mask), 4))
    for t, (x, y, area) in enumerate(zip(track.x, track.y, track.area, strict=True)):
        if area < _MIN_AREA:
            strength[t] = np.nan
            continue
        px = np.clip(x + np.outer(np.cos(angles), reach), 0, mask.shape[2] - 1).astype(int)
        py = np.clip(y + np.outer(np.sin(angles), reach), 0, mask.shape[1] - 1).astype(int)
        radius = mask[t, py, px].sum(axis=1) * 0.25
        waves = np.fft.rfft(radius)[2:6] * 2 / max(radius.sum(), 1e-9)
        strength[t], phase[t] = np.abs(waves), np.angle(waves)
    return strength, phase


def _shape(lobes: Array) -> str:
    """Five lobes make a star, three a triangle, four a square; none a circle."""
    _two, three, four, five = np.nanmedian(lobes, axis=0)
    if max(three, four, five) < 0.05:
        return "circle"
    return {0: "triangle", 1: "square", 2: "star"}[int(np.argmax([three, four, five]))]


def _contacts(track: _Track) -> Array:
    """Frames at which the shape turns from falling to rising, near the floor: peaks of its height, by a parabola."""
    y = track.bottom
    found: list[float] = []
    middle = track.y
    for t in range(1, len(y) - 1):
        around = middle[max(0, t - 4) : t + 5]
        turns = middle[t] >= middle[t - 1] and middle[t] > middle[t + 1]
        if turns and middle[t] - np.nanmin(around) > 3.0 and y[t] > FLOOR - 7 and (not found or t - found[-1] > 5):
            found.append(_corner(middle, t))
    return np.asarray(found)


def _corner(y: Array, t: int) -> float:
    """Where the lines through the three frames before and after a turn meet: a bounce falls between two frames."""
    before, after = np.arange(max(0, t - 3), t), np.arange(t + 1, min(len(y), t + 4))
    if len(before) < 2 or len(after) < 2:
        return float(t)
    (a, b), (c, d) = np.polyfit(before, y[before], 1), np.polyfit(after, y[after], 1)
    return float(np.clip((d - b) / (a - c), t - 1, t + 1)) if abs(a - c) > 1e-6 else float(t)


def _motion(track: _Track, shape: str, phase: Array, contacts: Array) -> str:
    """One of `toyworld.MOTIONS`, by what changes most: the size, the place, or the direction of the outline."""
    x, y, area = track.x, track.y, track.area
    ends = max(2, len(x) // 12)
    size = np.sqrt(np.nanmedian(area[-ends:]) / max(float(np.nanmedian(area[:ends])), 1.0))
    if size > 1.3 or size < 1 / 1.3:
        return "growing" if size > 1 else "shrinking"
    gone_x = np.nanmedian(x[-ends:]) - np.nanmedian(x[:ends])
    gone_y = np.nanmedian(y[-ends:]) - np.nanmedian(y[:ends])
    wide, tall = np.nanmax(x) - np.nanmin(x), np.nanmax(y) - np.nanmin(y)
    if max(wide, tall) < 4:
        return "spinning" if _turned(shape, phase) > np.pi / 3 else "still"
    if wide > 8 and tall > 8:
        return "orbiting"
    if wide >= tall:
        return "right" if gone_x > 0 else "left"
    if len(contacts):
        return "bouncing"
    return "down" if gone_y > 0 else "up"


def _turned(shape: str, phase: Array) -> float:
    """Radians that the outline has turned through in all."""
    lobe = {"triangle": 1, "square": 2, "star": 3}.get(shape)
    if lobe is None:
        return 0.0
    turn = np.unwrap(phase[:, lobe])
    return float(abs(turn[-1] - turn[0])) / (lobe + 2)


assert set(PITCH) == {"circle", "triangle", "square", "star"}
