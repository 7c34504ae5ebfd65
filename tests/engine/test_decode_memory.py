"""A budget for decoding: a size in words, tiles when it is small, refused before a clip is made for nothing."""

from __future__ import annotations

import numpy as np
import pytest

from diptych.engine.engine import Engine
from diptych.engine.options import pick_bytes
from diptych.errors import RequestError
from diptych.request import ClipRequest

REQUEST = ClipRequest("a red circle", width=256, height=128, frames=5, steps=1, seed=1)


@pytest.mark.parametrize(
    ("text", "size"),
    [("6GiB", 6 << 30), ("512MiB", 512 << 20), ("1.5 GB", 1_500_000_000), ("4096", 4096), (7, 7), (None, None)],
)
def test_sizes(text, size):
    assert pick_bytes("decode_memory", text) == size


@pytest.mark.parametrize("text", ["", "lots", "-1GiB", "0", "nan", "6 gigs", 0, True])
def test_what_is_no_size_is_refused(text):
    with pytest.raises(RequestError, match=r"decode_memory = .* such as 6GiB"):
        pick_bytes("decode_memory", text)


def decoded(tiny_base, memory):
    stages = []
    with Engine.load(tiny_base, device="cpu", decode_memory=memory) as engine:
        clip = engine.generate(REQUEST, lambda progress: stages.append((progress.stage, progress.total)))
    return clip, dict(stages)["decode"]


def test_less_memory_means_tiles_and_nearly_the_same_picture(tiny_base):
    whole, parts = decoded(tiny_base, None)
    tiled, more_parts = decoded(tiny_base, "180MiB")
    assert more_parts > parts
    assert np.array_equal(whole.latents["video"], tiled.latents["video"])
    assert np.abs(whole.frames.astype(int) - tiled.frames).mean() < 12, "seams are blended, not cut"
    again, _ = decoded(tiny_base, "180MiB")
    assert np.array_equal(again.frames, tiled.frames), "the plan is a function of shape and budget"


def test_too_little_memory_is_refused_before_a_step_is_made(tiny_base):
    stages = []
    with (
        Engine.load(tiny_base, device="cpu", decode_memory="1MiB") as engine,
        pytest.raises(RequestError, match="takes at least"),
    ):
        engine.generate(REQUEST, lambda progress: stages.append(progress.stage))
    assert stages == []
