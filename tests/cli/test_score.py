"""`diptych score`: the table, the file, the exit status; on random weights, whose clips are noise."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest

from diptych.bench.score import Score, failed, judge
from diptych.bench.score_engine import score_engine
from diptych.bench.toyworld_captions import score_prompts
from diptych.cli.main import run
from diptych.engine.engine import Engine
from diptych.errors import ClipError
from diptych.media.clip import Clip


def status(monkeypatch, *arguments) -> int:
    monkeypatch.setattr(sys, "argv", ["diptych", "score", *map(str, arguments)])
    with pytest.raises(SystemExit) as exit_:
        run()
    return int(exit_.value.code or 0)


@pytest.fixture(scope="module")
def engine(tiny_base):
    with Engine.load(tiny_base) as engine:
        yield engine


def test_it_prints_a_table_writes_a_file_and_fails_where_it_is_told_to(tiny_base, tmp_path, monkeypatch, capsys):
    few = ["--model", tiny_base, "--prompts", 2, "--steps", 1, "--guidance", 1, "--batch", 1, "--quiet"]
    assert status(monkeypatch, *few, "--json", tmp_path / "s.json", "--check", "--least", 99) == 1
    out = capsys.readouterr().out
    assert "colour of the main shape" in out
    assert "is below 99 %" in out
    assert "below their goals: color, " in out
    told = json.loads((tmp_path / "s.json").read_text())
    assert told["clips"] == len(told["verdicts"]) == 2
    assert told["setting"]["steps"] == 1
    assert told["setting"]["precision"] == "exact"
    assert told["verdicts"][1]["prompt"] == score_prompts(2)[1][1]
    assert status(monkeypatch, *few, "--least", 0) == 0


@pytest.mark.parametrize(
    ("option", "words"),
    [
        (("--least", 101), "--least = 101.0 is not accepted"),
        (("--steps", 0), "steps = 0 is not accepted"),
        (("--cache", "nothing"), "cache"),
        (("--json", "/nowhere/s.json"), "/nowhere"),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(tiny_base, monkeypatch, capsys, option, words):
    assert status(monkeypatch, "--model", tiny_base, *option) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("diptych: ")
    assert error.count("\n") == 1


def test_batches_make_the_clips_that_are_made_one_by_one(engine):
    chosen, seen = score_prompts(2), []

    def kept(done, total, verdict):
        seen.append((done, total, verdict.prompt, verdict.picture.background))

    scores = [score_engine(engine, chosen, [5], batch=n, steps=1, guidance=1.0, on_clip=kept) for n in (1, 2)]
    assert seen[:2] == seen[2:]
    assert [v.shares for v in scores[0].verdicts] == [v.shares for v in scores[1].verdicts]


def test_a_clip_that_is_refused_is_all_wrong_and_the_others_count(engine, monkeypatch):
    chosen, make = score_prompts(3), engine.generate_batch

    def refusing(requests, on_step=None):
        if any(request.prompt == chosen[1][1] for request in requests):
            raise ClipError("the picture is flat.")
        return make(requests, on_step)

    monkeypatch.setattr(engine, "generate_batch", refusing)
    verdicts = score_engine(engine, chosen, [5], batch=3, steps=1, guidance=1.0).verdicts
    assert [v.picture is None for v in verdicts] == [False, True, False]
    assert verdicts[1].mean == 0


def test_a_failed_clip_is_asked_what_a_real_one_would_be():
    silent = Clip(np.zeros((49, 64, 96, 3), np.uint8), np.zeros(90_112, np.float32), 24.0)
    for scene, prompt in score_prompts(39)[::3]:
        asked = {name for name, share in judge(scene, silent, prompt).shares.items() if share is not None}
        told = {name for name, share in failed(scene, prompt).shares.items() if share is not None}
        assert told == asked
    assert Score([failed(*score_prompts(1)[0])]).missed == ["color", "background", "motion", "shape", "pitch"]
