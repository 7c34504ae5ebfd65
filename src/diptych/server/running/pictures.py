"""Small pictures of a finished clip, made once, in the forms that the API promises."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from diptych.media.clip import Clip

THUMBNAIL_SIDE = 512
TILE_SIDE, COLUMNS, TILES = 256, 5, 25
WAVE = (1200, 160)


def thumbnail(clip: Clip) -> Image.Image:
    """The first frame, long side at most 512."""
    image = Image.fromarray(clip.frames[0])
    image.thumbnail((THUMBNAIL_SIDE, THUMBNAIL_SIDE), Image.Resampling.LANCZOS)
    return image


def sprite_sheet(clip: Clip) -> Image.Image:
    """At most 25 frames evenly over the clip, row by row, 5 in a row, each at most 256 on its long side."""
    count = min(len(clip.frames), TILES)
    chosen = np.linspace(0, len(clip.frames) - 1, count).round().astype(int)
    scale = min(TILE_SIDE / max(clip.width, clip.height), 1.0)
    tile = (max(round(clip.width * scale), 1), max(round(clip.height * scale), 1))
    columns = min(count, COLUMNS)
    sheet = Image.new("RGB", (tile[0] * columns, tile[1] * math.ceil(count / COLUMNS)))
    for place, frame in enumerate(chosen):
        picture = Image.fromarray(clip.frames[frame]).resize(tile, Image.Resampling.LANCZOS)
        sheet.paste(picture, (place % COLUMNS * tile[0], place // COLUMNS * tile[1]))
    return sheet


def waveform(audio: npt.NDArray[np.float32]) -> Image.Image:
    """The sound from left to right as bars around the middle, on a transparent ground; as loud as it is."""
    width, height = WAVE
    bars = width // 6
    pieces = np.array_split(np.abs(audio), bars) if len(audio) >= bars else [np.abs(audio)] * bars
    image = Image.new("RGBA", WAVE)
    draw = ImageDraw.Draw(image)
    for index, piece in enumerate(pieces):
        half = max(float(piece.max(initial=0.0)) ** 0.6 * (height / 2 - 4), 1.5)
        draw.rounded_rectangle(
            (index * 6, height / 2 - half, index * 6 + 3, height / 2 + half), 2, (139, 127, 255, 255)
        )
    return image
