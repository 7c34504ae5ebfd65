"""Clips of an engine with pipeline stages: what is exact is, what is not says so, and what cannot be is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from clip_work import approximated, clip

from diptych.engine.engine import Engine
from diptych.errors import LayoutError, RequestError
from diptych.request import ClipRequest
from diptych.sampling.pipefusion import PipeSettings

REQUEST = ClipRequest("a red circle", width=48, height=32, frames=9, steps=4, guidance=3.0, seed=7)


@pytest.mark.distributed
@pytest.mark.parametrize("modulation", ["resident", "tables"])
def test_warm_up_alone_gives_the_clip_of_one_rank(ranks, tiny_base: Path, modulation: str) -> None:
    settings = PipeSettings(warmup=4, patches=2)
    one, whole = clip("single", str(tiny_base), REQUEST, settings, modulation)
    (made, first), (_, second) = ranks(2)(clip, "pipeline=2", str(tiny_base), REQUEST, settings, modulation)
    assert np.array_equal(made.frames, one.frames)
    assert np.array_equal(made.audio, one.audio)
    assert "approximate" not in made.report
    assert first + second == whole and first == 2 * second, "three blocks: two, and one"


@pytest.mark.distributed
def test_an_approximation_says_so(ranks, tiny_base: Path) -> None:
    settings = PipeSettings(warmup=1, patches=2)
    one, _ = clip("single", str(tiny_base), REQUEST, settings, "resident")
    (made, _), _ = ranks(2)(clip, "pipeline=2", str(tiny_base), REQUEST, settings, "resident")
    assert made.report["approximate"] == [
        "pipefusion: in 3 of 4 steps each of 2 patches saw those behind it as they were a step before"
    ]
    assert made.report["layout"] == "pipeline=2"
    off = np.abs(made.latents["video"] - one.latents["video"])
    assert 0 < off.mean() < 0.5 * np.abs(one.latents["video"]).mean(), "near the exact clip, and not the same"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("precision", "blocks", "steps"),
    [("fp8", (2, 1), 4), ("fp8:steps=1,first=1,last=1", (1, 0), 3), ("fp8:first=2", (0, 1), 4)],
)
def test_every_stage_knows_which_blocks_attend_exactly(ranks, tiny_base: Path, precision, blocks, steps) -> None:
    """Three blocks, two on the first stage: once a step in both lanes while patches are whole, then once a patch."""
    counts = ranks(2)(approximated, "pipeline=2", str(tiny_base), REQUEST, PipeSettings(2, 2), precision)
    whole = steps - 2
    assert counts == [held * 2 * (whole + 2 * 2) for held in blocks]


@pytest.mark.parametrize("text", ["0", "2,0", "2,65", "two", "1,2,3", ""])
def test_settings_that_are_none(tiny_base: Path, text: str) -> None:
    with pytest.raises(RequestError, match=r"pipefusion = .* WARMUP or WARMUP,PATCHES, such as 2,8"):
        Engine.load(tiny_base, device="cpu", layout="pipeline=2", pipefusion=text)


def test_defaults() -> None:
    assert PipeSettings.parse(None, 4) == PipeSettings(2, 8)
    assert PipeSettings.parse("5", 2) == PipeSettings(5, 4)
    assert PipeSettings.parse(" 3 , 6 ", 2) == PipeSettings(3, 6)


def test_pipefusion_without_a_pipeline_is_refused(tiny_base: Path) -> None:
    with pytest.raises(RequestError, match="it goes with a layout such as pipeline=2, not with single"):
        Engine.load(tiny_base, device="cpu", pipefusion="2")


def test_a_step_cache_beside_it_is_refused(tiny_base: Path) -> None:
    with pytest.raises(RequestError, match="layout pipeline=2 reuses keys and values of earlier steps already"):
        Engine.load(tiny_base, device="cpu", layout="pipeline=2", cache="navicache")


def test_more_stages_than_blocks_are_refused(tiny_base: Path) -> None:
    with pytest.raises(LayoutError, match="layout pipeline=4 is not accepted: the model has 3 blocks to split"):
        Engine.load(tiny_base, device="cpu", layout="pipeline=4")
