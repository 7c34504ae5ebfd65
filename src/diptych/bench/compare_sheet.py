"""A comparison on one picture: both films, what differs, where in time, and both sounds."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from diptych.bench.compare import Comparison
from diptych.media.clip import Clip
from diptych.media.sheets import SHEET_WIDTH, rounded_mask, sheet_font, waveform

_CARD, _PANEL, _INK, _FAINT = (24, 25, 29, 255), (33, 34, 40, 255), (233, 234, 238, 255), (139, 143, 153, 255)
_CURVE, _ALERT = (86, 178, 232, 255), (245, 166, 91, 255)
_MARGIN, _GAP, _RADIUS, _SIDE = 44, 12, 10, 104
_HEAT = ((24, 25, 29), (58, 42, 110), (150, 54, 130), (228, 92, 84), (250, 178, 92), (255, 250, 220))
_BEST_DB = 60.0
"""Top of the curve: above this no difference of 8-bit pictures is seen or matters."""


def comparison_sheet(a: Clip, b: Clip, result: Comparison, names: tuple[str, str], count: int = 6) -> Image.Image:
    """RGBA, as wide as a contact sheet: a dark card with transparent corners.

    Rows of frames of A and of B and of their difference, made lighter by the factor that is told; under them the PSNR
    of every frame, and the waveforms. count: frames at most; the worst one is among them, and marked.
    """
    chosen = _chosen(len(result.psnr), count, result.worst)
    inner = SHEET_WIDTH - 2 * _MARGIN - _SIDE
    left = _MARGIN + _SIDE
    tile = (inner - (len(chosen) - 1) * _GAP) // max(len(chosen), 3)
    tall = max(round(tile * a.height / a.width), 1)
    sound = a.audio is not None or b.audio is not None
    top = _MARGIN + 190
    curve = top + 3 * (tall + _GAP) + 40
    waves = curve + 170
    height = waves + (210 if sound else 0) + _MARGIN - 20

    sheet = Image.new("RGBA", (SHEET_WIDTH, height))
    sheet.paste(_CARD, (0, 0), rounded_mask((SHEET_WIDTH, height), 28))
    draw = ImageDraw.Draw(sheet)
    _head(draw, names, result)

    corners = rounded_mask((tile, tall), _RADIUS)
    differences = np.stack([np.abs(a.frames[n].astype(np.int16) - b.frames[n]).mean(axis=2) for n in chosen])
    factor = _factor(float(differences.max()))
    rows = ("A", "B", "differs")
    for row, label in enumerate(rows):
        upper = top + row * (tall + _GAP)
        draw.text((_MARGIN, upper + tall / 2), label, _INK, sheet_font(24 if row < 2 else 20), anchor="lm")
        if row == 2:
            draw.text((_MARGIN, upper + tall / 2 + 24), f"x {factor}", _FAINT, sheet_font(18), anchor="lm")
        for place, index in enumerate(chosen):
            picture = (a.frames[index], b.frames[index], _heat(differences[place] * factor))[row]
            scaled = Image.fromarray(picture).resize((tile, tall), Image.Resampling.LANCZOS)
            sheet.paste(scaled, (left + place * (tile + _GAP), upper), corners)
    if np.isfinite(result.psnr[result.worst]):
        at = left + chosen.index(result.worst) * (tile + _GAP)
        box = (at - 5, top - 5, at + tile + 4, top + 3 * tall + 2 * _GAP + 4)
        draw.rounded_rectangle(box, _RADIUS + 5, outline=_ALERT, width=3)
    for place, index in enumerate(chosen):
        worst = index == result.worst and np.isfinite(result.psnr[index])
        text = f"{index / a.fps:.2f} s" + (" · worst" if worst else "")
        at = left + place * (tile + _GAP) + 2
        draw.text((at, top + 3 * (tall + _GAP) + 2), text, _ALERT if worst else _FAINT, sheet_font(18))

    _curve(sheet, draw, result, (left, curve, left + inner, curve + 120))
    if sound:
        for row, clip in enumerate((a, b)):
            upper = waves + row * 96
            draw.text((_MARGIN, upper + 42), rows[row], _INK, sheet_font(24), anchor="lm")
            if clip.audio is None:
                draw.text((left, upper + 42), "no sound", _FAINT, sheet_font(18), anchor="lm")
            else:
                sheet.alpha_composite(waveform(clip.audio, inner, 84), (left, upper))
    return sheet


def _head(draw: ImageDraw.ImageDraw, names: tuple[str, str], result: Comparison) -> None:
    for row, (letter, name) in enumerate(zip("AB", names, strict=True)):
        upper = _MARGIN + 2 + row * 38
        draw.text((_MARGIN, upper), letter, _CURVE, sheet_font(26))
        draw.text((_MARGIN + 34, upper), _short(name, 52), _INK, sheet_font(26))
    f = result.figures
    told = [
        ("PSNR, mean", _number(f["psnr"], "dB")),
        ("worst frame", _number(f["worst_psnr"], "dB")),
        ("SSIM, mean", _number(f["ssim"], "", 4)),
        ("worst frame", _number(f["worst_ssim"], "", 4)),
        ("temporal", _number(f["temporal"], "of 255")),
        ("log-mel", _number(f["log_mel"], "dB")),
        ("SI-SDR", _number(f["si_sdr"], "dB")),
    ]
    if f["worst_lpips"] is not None:
        told[4] = ("LPIPS, worst", _number(f["worst_lpips"], "", 3))
    wide = (SHEET_WIDTH - 2 * _MARGIN - (len(told) - 1) * _GAP) / len(told)
    for place, (label, value) in enumerate(told):
        at = _MARGIN + place * (wide + _GAP)
        upper = _MARGIN + 92
        draw.rounded_rectangle((at, upper, at + wide, upper + 76), _RADIUS, _PANEL)
        draw.text((at + 16, upper + 12), value, _INK, sheet_font(24))
        draw.text((at + 16, upper + 46), label, _FAINT, sheet_font(17))


def _curve(sheet: Image.Image, draw: ImageDraw.ImageDraw, result: Comparison, box: tuple[int, int, int, int]) -> None:
    """PSNR over time, from 10 dB at the bottom to `_BEST_DB`."""
    left, top, right, bottom = box
    for level in (20, 30, 40, 50):
        y = bottom - (level - 10) / (_BEST_DB - 10) * (bottom - top)
        draw.line((left, y, right, y), (48, 50, 58, 255), 1)
        draw.text((left - 12, y), f"{level} dB", _FAINT, sheet_font(16), anchor="rm")
    draw.text((_MARGIN, top - 4), "PSNR", _INK, sheet_font(20), anchor="lm")
    values = np.clip(result.psnr, 10, _BEST_DB)
    xs = np.linspace(0, right - left, len(values)) if len(values) > 1 else np.asarray([(right - left) / 2])
    ys = (bottom - top) * (1 - (values - 10) / (_BEST_DB - 10))
    size = (right - left + 1, bottom - top + 1)
    layer = Image.new("RGBA", (size[0] * 2, size[1] * 2))
    pen = ImageDraw.Draw(layer)
    points = [(2 * float(x), 2 * float(y)) for x, y in zip(xs, ys, strict=True)]
    if len(points) > 1:
        pen.polygon([*points, (points[-1][0], 2 * size[1]), (points[0][0], 2 * size[1])], (*_CURVE[:3], 40))
        for start, stop in pairwise(points):
            pen.line((*start, *stop), _CURVE, 5)
    if np.isfinite(result.psnr[result.worst]):
        x, y = points[result.worst]
        pen.ellipse((x - 9, y - 9, x + 9, y + 9), _ALERT)
    sheet.alpha_composite(layer.resize(size, Image.Resampling.LANCZOS), (left, top))


def _chosen(length: int, count: int, worst: int) -> list[int]:
    """Evenly spread frames; the one nearest to the worst gives way to it."""
    spread: list[int] = np.linspace(0, length - 1, min(count, length)).round().astype(int).tolist()
    nearest = min(range(len(spread)), key=lambda n: abs(spread[n] - worst))
    spread[nearest] = worst
    return spread


def _factor(largest: float) -> int:
    """A round factor that brings the largest difference near to white."""
    return next((f for f in (1, 2, 4, 8, 16, 32) if largest * f * 2 > 255), 64)


def _heat(values: npt.NDArray[np.floating]) -> npt.NDArray[np.uint8]:
    """0..255 to colours from the card's own over violet and orange to white."""
    stops = np.linspace(0, 255, len(_HEAT))
    channels = [np.interp(values, stops, [colour[c] for colour in _HEAT]) for c in range(3)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def _number(value: float | None, unit: str, digits: int = 1) -> str:
    if value is None:
        return "–"
    text = ("∞" if value > 0 else "-∞") if np.isinf(value) else f"{value:.{digits}f}"
    return f"{text} {unit}".strip()


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else "… " + text[2 - most :]
