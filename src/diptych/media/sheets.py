"""A clip at a glance: contact sheet, waveform, thumbnail, sprite sheet."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from diptych.media.clip import Clip
from diptych.media.files import replacing

SHEET_WIDTH = 1600
"""Pixels of a contact sheet from edge to edge."""

_CARD, _INK, _FAINT = (24, 25, 29, 255), (233, 234, 238, 255), (139, 143, 153, 255)
_WAVE_FROM, _WAVE_TO = (86, 178, 232), (172, 136, 245)
_MARGIN, _GAP, _RADIUS = 44, 14, 10
_FINE = 4
"""Pillow draws without antialiasing: shapes are drawn this many times larger and scaled down."""


def contact_sheet(clip: Clip, count: int = 12, title: str | None = None) -> Image.Image:
    """Frames in a grid with their times, and the sound under them: RGBA, `SHEET_WIDTH` wide.

    A dark card with transparent corners, so that it sits on a light page and on a dark one. count: frames at most,
    evenly spread from the first to the last. title: the prompt in the clip's report unless given; characters that
    the built-in font lacks are left out.
    """
    chosen = _spread(len(clip.frames), count)
    columns = _columns(len(chosen), clip.width / clip.height)
    inner = SHEET_WIDTH - 2 * _MARGIN
    tile = (inner - (columns - 1) * _GAP) // columns
    tall = max(round(tile * clip.height / clip.width), 1)
    line = tall + 34
    lines = _wrapped(title if title is not None else _asked(clip, "prompt"), inner, sheet_font(30), at_most=2)
    top = _MARGIN + 42 * len(lines) + (6 if lines else 0) + 44
    rows = -(-len(chosen) // columns)
    sound = 168 if clip.audio is not None else 0
    height = top + rows * line + (rows - 1) * _GAP + sound + _MARGIN - (0 if sound else 8)

    sheet = Image.new("RGBA", (SHEET_WIDTH, height))
    sheet.paste(_CARD, (0, 0), rounded_mask((SHEET_WIDTH, height), 28))
    draw = ImageDraw.Draw(sheet)
    for number, words in enumerate(lines):
        draw.text((_MARGIN, _MARGIN - 8 + 42 * number), words, _INK, sheet_font(30))
    draw.text((_MARGIN, top - 46), _facts(clip), _FAINT, sheet_font(20))
    corners = rounded_mask((tile, tall), _RADIUS)
    for place, index in enumerate(chosen):
        left = _MARGIN + place % columns * (tile + _GAP)
        upper = top + place // columns * (line + _GAP)
        picture = Image.fromarray(clip.frames[index]).resize((tile, tall), Image.Resampling.LANCZOS)
        sheet.paste(picture, (left, upper), corners)
        draw.text((left + 2, upper + tall + 8), f"{index / clip.fps:.2f} s", _FAINT, sheet_font(18))
    if clip.audio is not None:
        upper = top + rows * line + (rows - 1) * _GAP + 26
        wave = waveform(clip.audio, inner, 104)
        sheet.alpha_composite(wave, (_MARGIN, upper))
        _ruler(draw, clip, inner, upper + 108)
    return sheet


def waveform(audio: npt.NDArray[np.float32], width: int = 1200, height: int = 160) -> Image.Image:
    """The sound from left to right as rounded bars about the middle, RGBA on a transparent ground.

    A bar reaches to its stretch's peak, full scale at the edge; quiet sounds are drawn larger than they are (power
    0.6), as they are heard. Silence is a row of dots.
    """
    pitch, thick = 6, 3
    bars = max(width // pitch, 1)
    edges = np.linspace(0, len(audio), bars + 1).round().astype(int)
    colours = Image.new("RGB", (bars, 1))
    shape = Image.new("L", (width * _FINE, height * _FINE))
    draw = ImageDraw.Draw(shape)
    for bar, (start, stop) in enumerate(pairwise(edges)):
        peak = float(np.abs(audio[start:stop]).max(initial=0.0))
        half = max(min(peak, 1.0) ** 0.6 * height / 2, thick / 2)
        left = bar * pitch + (pitch - thick) / 2
        box = (left, height / 2 - half, left + thick, height / 2 + half)
        draw.rounded_rectangle([round(side * _FINE) for side in box], thick * _FINE / 2, 255)
        share = bar / max(bars - 1, 1)
        colours.putpixel((bar, 0), _between(share))
    image: Image.Image = colours.resize((width, height), Image.Resampling.BILINEAR).convert("RGBA")
    image.putalpha(shape.resize((width, height), Image.Resampling.BOX))
    return image


def thumbnail(clip: Clip, side: int = 512) -> Image.Image:
    """The first frame, RGB, its long side at most `side` pixels."""
    image = Image.fromarray(clip.frames[0])
    image.thumbnail((side, side), Image.Resampling.LANCZOS)
    return image


def sprite_sheet(clip: Clip, columns: int = 5, count: int = 25, side: int = 256) -> Image.Image:
    """At most `count` frames evenly over the clip, row by row and edge to edge, RGB; long sides at most `side`."""
    chosen = _spread(len(clip.frames), count)
    scale = min(side / max(clip.width, clip.height), 1.0)
    tile = (max(round(clip.width * scale), 1), max(round(clip.height * scale), 1))
    columns = min(columns, len(chosen))
    sheet = Image.new("RGB", (tile[0] * columns, tile[1] * -(-len(chosen) // columns)))
    for place, index in enumerate(chosen):
        picture = Image.fromarray(clip.frames[index]).resize(tile, Image.Resampling.LANCZOS)
        sheet.paste(picture, (place % columns * tile[0], place // columns * tile[1]))
    return sheet


def save_png(path: str | Path, image: Image.Image) -> Path:
    """Write `image` as PNG, whole or not at all. Raises `MediaError`."""
    with replacing(path) as temporary:
        image.save(temporary, "PNG")
    return Path(path)


def _spread(length: int, count: int) -> list[int]:
    chosen: list[int] = np.linspace(0, length - 1, min(count, length)).round().astype(int).tolist()
    return chosen


def _columns(count: int, aspect: float) -> int:
    """As many columns as make the grid somewhat wider than 16:9, with full rows where that is near."""
    wanted = math.sqrt(count * 2.2 / aspect)
    choices = range(1, count + 1)
    return min(choices, key=lambda n: abs(math.log(n / wanted)) + 0.5 * (-count % n) / n)


def _asked(clip: Clip, field: str) -> str:
    """A field of the request in the clip's report, empty where it does not tell."""
    request = clip.report.get("request")
    return str(request.get(field, "")) if isinstance(request, dict) else ""


def _facts(clip: Clip) -> str:
    facts = [f"{clip.width} x {clip.height}", f"{len(clip.frames)} frame{'s' * (len(clip.frames) > 1)}"]
    facts += [f"{clip.fps:.5g} fps", f"{clip.seconds:.2f} s"]
    facts.append("no sound" if clip.audio is None else f"{clip.sample_rate / 1000:g} kHz")
    seed = _asked(clip, "seed")
    if seed:
        facts.append(f"seed {seed}")
    return "   ·   ".join(facts)


def _ruler(draw: ImageDraw.ImageDraw, clip: Clip, width: int, upper: int) -> None:
    """Seconds under the waveform: a label at every round step that leaves room for it."""
    step = next(s for s in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 60, 600) if s / clip.seconds * width >= 120 or s == 600)
    for number in range(int(clip.seconds / step + 1e-6) + 1):
        second = number * step
        at = _MARGIN + round(second / clip.seconds * width)
        if at > _MARGIN + width - 24:
            break
        draw.line((at, upper, at, upper + 6), _FAINT, 1)
        draw.text((at if not number else at - 4, upper + 10), f"{second:g} s", _FAINT, sheet_font(16))


def _between(share: float) -> tuple[int, int, int]:
    r, g, b = (round(a + (z - a) * share) for a, z in zip(_WAVE_FROM, _WAVE_TO, strict=True))
    return r, g, b


def _wrapped(text: str, width: int, font: ImageFont.FreeTypeFont, at_most: int) -> list[str]:
    # More never fits, and measuring a prompt of 20,000 characters word by word takes its time.
    words = "".join(c if _drawable(c, font) else " " for c in text[: 200 * at_most]).split()
    lines: list[str] = []
    while words and len(lines) < at_most:
        taken = 1
        while taken < len(words) and font.getlength(" ".join(words[: taken + 1])) <= width:
            taken += 1
        lines.append(" ".join(words[:taken]))
        words = words[taken:]
    if lines:
        if words:
            lines[-1] += " …"
        while font.getlength(lines[-1]) > width:
            lines[-1] = lines[-1][:-2].rstrip(" …") + "…"
    return lines


@cache
def _drawable(character: str, font: ImageFont.FreeTypeFont) -> bool:
    return character.isspace() or bytes(font.getmask(character)) != bytes(font.getmask("\uffff"))


@cache
def sheet_font(size: int) -> ImageFont.FreeTypeFont:
    """The font of all sheets, which comes inside Pillow."""
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont), "Pillow's wheels have FreeType"
    return font


def rounded_mask(size: tuple[int, int], radius: int) -> Image.Image:
    """A mask (width, height) with smooth round corners, to paste a card or a picture through."""
    mask = Image.new("L", (size[0] * _FINE, size[1] * _FINE))
    box = (0, 0, mask.width - 1, mask.height - 1)
    ImageDraw.Draw(mask).rounded_rectangle(box, radius * _FINE, 255)
    return mask.resize(size, Image.Resampling.BOX)
