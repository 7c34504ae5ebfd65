"""Clips to write, read, show and check."""

from __future__ import annotations

import numpy as np
import pytest

from diptych.media.clip import Clip


def _make(frames=25, width=96, height=64, fps=24.0, audio=True, report=None):
    """A bright square that moves right over a coloured ramp, and a tone that swells."""
    picture = np.zeros((frames, height, width, 3), dtype=np.uint8)
    picture[..., 0] = np.linspace(20, 120, width)
    picture[..., 1] = np.linspace(40, 90, height)[:, None]
    picture[..., 2] = 100
    for index in range(frames):
        left = index * (width - 24) // max(frames - 1, 1)
        picture[index, height // 4 : height // 4 + 24, left : left + 24] = (240, 200, 60)
    samples = round(frames / fps * 44_100)
    time = np.arange(samples) / 44_100
    sound = (0.5 * np.sin(2 * np.pi * 440 * time) * np.linspace(0, 1, samples)).astype(np.float32)
    return Clip(picture, sound if audio else None, fps, report=report or {})


@pytest.fixture(scope="session")
def make_clip():
    return _make


@pytest.fixture
def clip():
    return _make(report={"request": {"prompt": "a square", "width": 96, "height": 64, "seed": 7}})
