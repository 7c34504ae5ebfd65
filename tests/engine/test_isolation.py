"""Nothing computed for one request can be seen by the next."""

from __future__ import annotations

import numpy as np
import pytest
from test_parity import SMALL, picture

from diptych.engine.engine import Engine
from diptych.errors import Cancelled
from diptych.request import ClipRequest

BETWEEN = {
    "the same": {},
    "another size": {"width": 64, "height": 64, "frames": 13},
    "with an image": {"image": picture(48, 32)},
    "without sound": {"audio": False},
    "other steps": {"steps": 5},
    "no guidance": {"guidance": 1.0},
    "other seed": {"seed": 99},
    "other prompt": {"prompt": "a completely different and much longer prompt about nothing in particular"},
}


@pytest.fixture(scope="module", params=["base", "distilled"])
def engine(request, tiny_base, tiny_distilled):
    with Engine.load(tiny_base if request.param == "base" else tiny_distilled, device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def first(engine):
    return engine.generate(ClipRequest("a red circle", **SMALL))


@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN.keys())
def test_a_request_in_between_changes_nothing(engine, first, between):
    if "guidance" in between and engine.defaults.distilled:
        pytest.skip("a distilled checkpoint has no other guidance")
    values = {"prompt": "a red circle"} | SMALL | between
    other = engine.generate(ClipRequest(**values))
    again = engine.generate(ClipRequest("a red circle", **SMALL))
    assert np.array_equal(first.frames, again.frames)
    assert np.array_equal(first.audio, again.audio)
    if between:
        same_shape = other.frames.shape == first.frames.shape
        assert not same_shape or not np.array_equal(other.frames, first.frames), "the request in between did not differ"


def test_a_cancelled_request_stops_at_that_step_and_leaves_nothing(engine, first):
    steps = []

    def on_step(progress):
        if progress.stage == "denoise":
            steps.append(progress.done)
            if progress.done == 2:
                raise Cancelled("enough")

    with pytest.raises(Cancelled):
        engine.generate(ClipRequest("a red circle", **(SMALL | {"steps": 6})), on_step)
    assert steps == [0, 1, 2]
    again = engine.generate(ClipRequest("a red circle", **SMALL))
    assert np.array_equal(first.frames, again.frames)
    assert np.array_equal(first.audio, again.audio)


def test_progress_previews_approach_the_clip(engine):
    distances = []

    def on_step(progress):
        if progress.preview is not None:
            distances.append(progress.preview())

    clip = engine.generate(ClipRequest("a red circle", **SMALL), on_step)
    last = np.abs(distances[-1].numpy() - clip.latents["video"]).max()
    assert len(distances) == SMALL["steps"]
    assert last < np.abs(distances[0].numpy() - clip.latents["video"]).max()
    if not engine.defaults.distilled:  # whose last segment is rolled out, and not one straight line
        assert last < 1e-5, "after the last step the estimate is the result"
