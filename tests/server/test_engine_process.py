"""What the settings say reaches the engine in its process, and it is warm before it is called ready."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from tests.server.fake_engine import FakeEngine
from tests.server.serving import PATHS

from diptych.errors import RequestError
from diptych.media.clip import Clip
from diptych.request import ClipRequest
from diptych.server.running.messages import Loading, Ready, Unloadable
from diptych.server.running.process import EngineProcess
from diptych.server.settings import load as load_settings


class Telling(FakeEngine):
    """Writes down what it was loaded with and what it made, a line each."""

    def note(self, **what: Any) -> None:
        with Path(os.environ["DIPTYCH_TEST_NOTES"]).open("a") as file:
            file.write(json.dumps(what) + "\n")

    def generate(self, request: ClipRequest, on_step: Any = None, **options: Any) -> Clip:
        self.note(width=request.width, height=request.height, frames=request.frames)
        return super().generate(request, on_step, **options)


def load(checkpoint: str, *, on_progress: Any = None, **options: Any) -> Telling:
    engine = Telling()
    engine.note(checkpoint=checkpoint, gpus=os.environ.get("CUDA_VISIBLE_DEVICES"), **options)
    if options["cache"] == "odd":
        raise RequestError("cache", "odd", "one of magcache, taylor")
    return engine


@pytest.fixture
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DIPTYCH_TEST_NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("PYTHONPATH", PATHS)
    return tmp_path / "notes"


def start(folder: Path, *flags: str) -> list[object]:
    """All that the second of two engines says until it is ready, or cannot be."""
    settings = load_settings(["some/model", "--state-dir", str(folder), "--replicas", "2", *flags])
    process = EngineProcess(settings, 1, "tests.server.test_engine_process:load")
    said: list[object] = []
    try:
        while not (said and isinstance(said[-1], Ready | Unloadable)):
            assert process.pipe.poll(60)
            said.append(process.pipe.recv())
    finally:
        process.end()
    return said


def test_settings_reach_the_engine_and_it_is_warm_before_it_is_ready(tmp_path: Path, notes: Path) -> None:
    flags = {
        "layout": "cfg=2", "device": "cuda", "dtype": "bfloat16", "precision": "fp8:steps=1,first=2",
        "text_precision": "8bit", "modulation": "tables", "offload": "block", "memory": "22GiB", "cache": "taylor",
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", value)]
    words += ["--gpus", "4,5,6,7", "--warm-up", "64x32x5", "--warm-up", "96x64x9"]
    said = start(tmp_path / "state", *words)
    first, *clips = [json.loads(line) for line in notes.read_text().splitlines()]
    assert first == flags | {"checkpoint": "some/model", "gpus": "6,7"}
    shapes = [(clip["width"], clip["height"], clip["frames"]) for clip in clips]
    assert shapes == [(64, 32, 5), (96, 64, 9)]
    loading = [message.what for message in said if isinstance(message, Loading)]
    assert [what for what in loading if what.startswith("warm-up")] == ["warm-up 64x32x5", "warm-up 96x64x9"]
    assert isinstance(said[-1], Ready)
    assert said[-1].defaults["width"] == FakeEngine.defaults.width


def test_what_the_engine_refuses_is_told_in_its_own_sentence(tmp_path: Path, notes: Path) -> None:
    last = start(tmp_path / "state", "--cache", "odd")[-1]
    assert last == Unloadable("cache = 'odd' is not accepted: one of magcache, taylor.")
