"""A look at the data: the frames of some clips in rows, with caption and sound beside them, on one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from diptych.bench.toyworld import FPS
from diptych.media.clip import Clip
from diptych.media.sheets import waveform
from tools.toyworld.source import draw

_FRAMES, _SCALE, _GAP, _WAVE = 8, 1.5, 6, 300
_INK, _PAPER = (233, 234, 238, 255), (24, 25, 29, 255)


def preview(path: Path, count: int = 12, seed: int = 1) -> Path:
    """Write a picture of `count` clips of the training set; returns `path`."""
    drawn = draw(seed, 0, count)
    pictures, waves = drawn.render()
    clips = [as_clip(p.numpy(), w.numpy()) for p, w in zip(pictures, waves, strict=True)]
    return rows(path, clips, drawn.captions)


def as_clip(pictures: npt.NDArray[np.float32], wave: npt.NDArray[np.float32]) -> Clip:
    """A clip of pictures (3, F, H, W) in [-1, 1] and a waveform."""
    frames = np.rint((pictures.transpose(1, 2, 3, 0) + 1) * 127.5).astype(np.uint8)
    return Clip(frames=frames, audio=wave.astype(np.float32), fps=FPS)


def rows(path: Path, clips: Sequence[Clip], captions: Sequence[str]) -> Path:
    """One row a clip: its caption, eight frames from the first to the last, its waveform."""
    wide, tall = round(clips[0].width * _SCALE), round(clips[0].height * _SCALE)
    line = tall + 34
    size = (2 * 16 + _FRAMES * (wide + _GAP) + _WAVE + 10, 2 * 12 + line * len(clips))
    sheet = Image.new("RGBA", size, _PAPER)
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(16)
    for row, (clip, caption) in enumerate(zip(clips, captions, strict=True)):
        top = 12 + row * line
        pen.text((16, top), caption, _INK, font)
        for place, index in enumerate(np.linspace(0, len(clip.frames) - 1, _FRAMES).round().astype(int)):
            picture = Image.fromarray(clip.frames[index]).resize((wide, tall), Image.Resampling.LANCZOS)
            sheet.paste(picture, (16 + place * (wide + _GAP), top + 24))
        if clip.audio is not None:
            wave = waveform(clip.audio, _WAVE, tall)
            sheet.alpha_composite(wave, (16 + _FRAMES * (wide + _GAP) + 4, top + 24))
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.convert("RGB").save(path, optimize=True)
    return path
