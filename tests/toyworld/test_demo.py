"""The model in the package: it is there, it is small, it makes what is asked for, and a broken one does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from diptych.bench.score import Score
from diptych.bench.score_engine import score_engine
from diptych.bench.toyworld import Scene
from diptych.bench.toyworld_captions import score_prompts
from diptych.engine.engine import Engine, InProcess, open_checkpoint
from diptych.model.catalogue import BUILT_IN
from diptych.server.settings import Settings

ROOT = Path(__file__).parents[2]
STEPS = 6
CHOSEN = [one for one in score_prompts(39) if one[0].sound != "silent"]
FEW = [one for one in CHOSEN if one[0].sound == "knock"][:1] + CHOSEN[:4]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load() as engine:
        yield engine


def scored(engine: Engine, chosen: list[tuple[Scene, str]]) -> Score:
    result = score_engine(engine, chosen, [0], batch=5, steps=STEPS)
    assert result is not None
    return result


def test_it_travels_in_the_wheel() -> None:
    builder = pytest.importorskip("hatchling.builders.wheel").WheelBuilder(str(ROOT))
    packed = {file.distribution_path for file in builder.recurse_included_files()}
    files = [file for file in BUILT_IN.rglob("*") if file.is_file()]
    assert len(files) > 15
    assert {f"diptych/demo/{file.relative_to(BUILT_IN).as_posix()}" for file in files} <= packed
    assert sum(file.stat().st_size for file in files) <= 24_000_000


def test_it_runs_when_no_model_is_named(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demo").mkdir()
    monkeypatch.chdir(tmp_path)  # a folder that happens to have its name
    assert open_checkpoint(None).root == open_checkpoint("demo").root == BUILT_IN
    assert Settings.model_fields["checkpoint"].default == "demo"
    assert (engine.defaults.width, engine.defaults.height, engine.defaults.frames) == (96, 64, 49)


def test_its_clips_show_and_sound_like_what_was_asked_for(engine: Engine) -> None:
    """Few prompts and few steps, so as to be quick; the whole table is in docs/demo-model.md."""
    result = scored(engine, FEW)
    assert result.total >= 0.85, result.table()


def _no_text(parts: Any) -> None:
    for block in parts.transformer.visual_transformer_blocks:
        nn.init.zeros_(block.video_dec_block.cross_attention.out_layer.weight)


def _swapped_colours(parts: Any) -> None:
    conv = parts.vae.decoder.conv_out.conv
    conv.weight.data, conv.bias.data = conv.weight.data[[2, 0, 1]], conv.bias.data[[2, 0, 1]]


def _deaf(parts: Any) -> None:
    nn.init.normal_(parts.vocoder.conv_pre.weight, std=0.02)


@pytest.mark.parametrize(
    ("broken", "measure"),
    [(_no_text, "motion"), (_swapped_colours, "color"), (_deaf, "pitch")],
)
def test_a_broken_part_is_seen_in_its_measure(engine: Engine, broken: Callable[[Any], None], measure: str) -> None:
    assert isinstance(engine._executor, InProcess)
    parts = engine._executor._runner.components
    before = {name: deepcopy(getattr(parts, name).state_dict()) for name in ("transformer", "vae", "vocoder")}
    try:
        with torch.no_grad():
            broken(parts)
        assert scored(engine, FEW[1:3]).share(measure) <= 0.5
    finally:
        for name, state in before.items():
            getattr(parts, name).load_state_dict(state)
