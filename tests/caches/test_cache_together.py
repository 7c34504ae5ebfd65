"""Step caches beside the engine's other settings: fp8, offload, other numbers of steps; refused beside PipeFusion."""

from __future__ import annotations

import numpy as np
import pytest
from caches_work import CACHES, SIZE

from diptych.engine.engine import Engine
from diptych.errors import RequestError
from diptych.request import ClipRequest

REQUEST = ClipRequest("a red circle", **SIZE)


def same(a, b) -> bool:
    return np.array_equal(a.frames, b.frames) and np.array_equal(a.audio, b.audio)


@pytest.fixture(scope="module")
def quantised(tiny_base, cache_home):
    with Engine.load(tiny_base, device="cpu", precision="fp8:2") as engine:
        yield engine


@pytest.fixture(scope="module")
def fp8_clip(quantised):
    return quantised.generate(REQUEST)


@pytest.fixture(scope="module")
def offloaded(tiny_base, cache_home):
    with Engine.load(tiny_base, device="cpu", offload="block", memory="1GiB") as engine:
        yield engine


@pytest.mark.parametrize("name", ["teacache", "firstblock", "cachedit"])
def test_offload_changes_no_bit_of_a_cached_clip(name, engine, offloaded):
    """Blocks that are left out, or of which only the first runs, come and go as they are needed."""
    clip = offloaded.generate(REQUEST, cache=CACHES[name])
    resident = engine.generate(REQUEST, cache=CACHES[name])
    assert clip.report["offload"] == "block"
    assert clip.report["forwards"] == resident.report["forwards"]
    assert 0 < clip.report["forwards"]["computed"] < clip.report["forwards"]["total"]
    assert same(clip, resident)


@pytest.mark.parametrize("name", ["firstblock", "navicache", "taylor"])
def test_fp8_and_a_cache_are_two_approximations_and_both_are_told(name, quantised, fp8_clip):
    """What a cache predicts comes from what the quantised model computed."""
    clip, exact = quantised.generate(REQUEST, cache=CACHES[name]), fp8_clip
    assert clip.report["precision"] == "fp8:2"
    assert clip.report["cache"]["name"].startswith(name)
    assert 0 < clip.report["forwards"]["computed"] < clip.report["forwards"]["total"]
    assert not same(clip, exact)
    stray = np.abs(clip.latents["video"] - exact.latents["video"]).mean() / np.abs(exact.latents["video"]).mean()
    assert stray < 0.2, "a prediction is near what fp8 computes"


def test_a_cache_that_predicts_nothing_changes_no_bit_of_fp8(quantised, fp8_clip):
    assert same(quantised.generate(REQUEST, cache="firstblock:0"), fp8_clip)


def test_what_was_calibrated_in_full_precision_serves_fp8(engine, quantised):
    """Both are one checkpoint, so the schedule of MagCache is the same."""
    clips = [one.generate(REQUEST, cache=CACHES["magcache"]) for one in (engine, quantised)]
    assert clips[0].report["forwards"] == clips[1].report["forwards"]
    assert clips[0].report["cache"]["calibration"] == clips[1].report["cache"]["calibration"]


@pytest.mark.parametrize("name", CACHES)
def test_pipefusion_refuses_every_cache_by_name(name, tiny_base):
    with pytest.raises(RequestError, match=f"cache = '{name}' is not accepted: layout pipeline=2 reuses"):
        Engine.load(tiny_base, device="cpu", layout="pipeline=2", cache=name)


@pytest.mark.parametrize("text", ["cachedit:0.45,2,0.2", "firstblock:0.45,2,0.2", "taylor"])
def test_a_clip_shorter_than_its_fixed_steps_is_exact(text, engine):
    """First and last steps are always computed: with two steps there are no others."""
    two = ClipRequest("waves", **(SIZE | {"steps": 2}))
    assert same(engine.generate(two, cache=text), engine.generate(two))
