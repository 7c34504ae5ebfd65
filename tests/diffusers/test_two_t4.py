"""docs/examples/two_t4.py: it runs as it stands, makes the engine's clip, and counts beforehand what fits."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from document_work import EXAMPLES, run_script, script

from diptych.engine.engine import Engine
from diptych.errors import RequestError
from diptych.memory.footprint import GIB, RELEASED, Size
from diptych.model.checkpoint import Checkpoint
from diptych.model.config import LITE
from diptych.parallel import Layout
from diptych.planner.geometry import Geometry
from diptych.request import ClipRequest

SIZE = {"width": 80, "height": 48, "frames": 9, "steps": 2}
ARGUMENTS = ["--size", "80x48", "--frames", "9", "--steps", "2", "--seed", "3", "--prompt", "a red circle"]


@pytest.mark.distributed
@pytest.mark.parametrize(("dtype", "mean", "most"), [("float32", 0.001, 1), ("float16", 2, 16)])
def test_it_makes_the_clip_of_the_engine(
    ranks, tiny_base: Path, tmp_path: Path, dtype: str, mean: float, most: int
) -> None:
    """To rounding, which in float16 is that of a merge between the ranks."""
    output = ["--output", str(tmp_path / "two.mp4")]
    two, _ = ranks(2)(run_script, "two_t4", [str(tiny_base), *ARGUMENTS, "--dtype", dtype, *output])
    with Engine.load(tiny_base, device="cpu", dtype=dtype) as engine:
        one = engine.generate(ClipRequest("a red circle", seed=3, **SIZE))
    assert one.frames.std() > 1, "a flat picture shows nothing"
    off = np.abs(two.frames.astype(int) - one.frames)
    assert off.mean() <= mean and off.max() <= most
    assert np.abs(two.audio - one.audio).max() <= (1e-4 if dtype == "float32" else 0.2)
    assert (tmp_path / "two.mp4").stat().st_size > 1000


def test_the_page_tells_what_the_released_checkpoint_takes() -> None:
    two_t4 = script("two_t4")
    page = (EXAMPLES.parent / "diffusers.md").read_text()
    columns = []
    for geometry in (Geometry.parse("432x256x25"), Geometry.parse("864x480x121")):
        T, Y, X = geometry.latents
        size = Size(T=T, Y=Y, X=X, A=geometry.audio_tokens, L=1024, steps=10)
        predicted = two_t4.count(LITE.distilled(), RELEASED, size, Layout(ulysses=2), 15 * GIB - two_t4.CONTEXT)
        two_t4.check(predicted, 15 * GIB)
        columns.append(predicted)
    for name in columns[0]:
        (row,) = re.findall(rf"^\| {name} \|.*\| ([0-9.]+) \| ([0-9.]+) \|$", page, re.MULTILINE)
        assert row == tuple(f"{column[name].peak / GIB:.1f}" for column in columns), name


def test_a_card_that_is_too_small_is_refused_before_a_weight_is_read(tiny_base: Path) -> None:
    two_t4 = script("two_t4")
    checkpoint = Checkpoint.open(tiny_base)
    request = ClipRequest("a red circle", seed=3, **SIZE).resolve(checkpoint.defaults)
    predicted = two_t4.stages(checkpoint, request, Layout(ulysses=2), two_t4.GIB)
    assert list(predicted) == ["text", "denoise", "picture", "sound"]
    with pytest.raises(RequestError, match=r"--cap = '0.60 GiB' is not accepted: the stage \w+ takes .* GiB"):
        two_t4.check(predicted, int(0.6 * two_t4.GIB))
    two_t4.check(predicted, 15 * two_t4.GIB)
