"""The engine process's side of the pipe, without a process: what each ending is told as."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from tests.server.fake_engine import FakeEngine

from diptych.errors import DeviceMemoryError, RequestError
from diptych.media.clip import Clip
from diptych.parallel.layout import Layout
from diptych.request import ClipRequest
from diptych.server.running.messages import Cancel, Failed, Finished, Run, Step, Stopped
from diptych.server.running.worker import Worker, about


@pytest.fixture
def pipes() -> Iterator[tuple[Connection, Connection]]:
    ours, theirs = Pipe()
    yield ours, theirs
    ours.close()
    theirs.close()


def run_of(folder: Path, prompt: str = "a lamp", job: str = "a") -> Run:
    fields = {"prompt": prompt, "width": 64, "height": 64, "frames": 5, "fps": 24.0, "steps": 4}
    return Run(job, fields, (1,), None, folder, 18, "veryfast", 2)


class Failing(FakeEngine):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def generate(self, request: ClipRequest, on_step: Any = None, **_: Any) -> Clip:
        raise self.error


@pytest.mark.parametrize(
    ("error", "code", "fatal"),
    [
        (RequestError("prompt", "x", "y"), "invalid_value", False),
        (MemoryError(), "out_of_memory", False),
        (DeviceMemoryError("cuda:0 ran out of memory in stage denoise: 1 GiB"), "out_of_memory", False),
        (RuntimeError("CUDA error: device-side assert"), "engine_failed", True),
        (ConnectionResetError(errno.ECONNRESET, "a rank is gone"), "engine_failed", True),
    ],
)
def test_each_fault_has_its_code_and_only_unknown_ones_end_the_engine(
    pipes: tuple[Connection, Connection], tmp_path: Path, error: Exception, code: str, fatal: bool
) -> None:
    answer = Worker(pipes[1]).make(Failing(error), run_of(tmp_path))
    assert isinstance(answer, Failed)
    assert (answer.code, answer.fatal) == (code, fatal)


def test_a_full_disk_is_told_as_such(
    pipes: tuple[Connection, Connection], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("diptych.server.running.worker.finish", full)
    answer = Worker(pipes[1]).make(FakeEngine(), run_of(tmp_path))
    assert answer == Failed("a", "storage_failed", "The disk is full.", fatal=False)


def test_a_wish_to_stop_that_comes_with_the_job_is_heard(pipes: tuple[Connection, Connection], tmp_path: Path) -> None:
    worker = Worker(pipes[1])
    for message in (Cancel("earlier"), run_of(tmp_path), Cancel("a")):
        worker.take(message)
    assert worker.make(FakeEngine(), worker.next()) == Stopped("a")
    worker.take(run_of(tmp_path, job="b"))
    assert isinstance(worker.make(FakeEngine(), worker.next()), Finished)


def test_progress_and_previews_go_through_the_pipe(pipes: tuple[Connection, Connection], tmp_path: Path) -> None:
    worker = Worker(pipes[1])
    engine = FakeEngine()
    worker.picture = engine.preview_picture
    assert isinstance(worker.make(engine, run_of(tmp_path)), Finished)
    told = []
    while pipes[0].poll():
        told.append(pipes[0].recv())
    assert all(isinstance(step, Step) for step in told)
    stages = [(step.stage, step.done, step.preview is not None) for step in told]
    assert stages == [
        ("text", 1, False),
        ("denoise", 1, False),
        ("denoise", 2, True),
        ("denoise", 3, False),
        ("denoise", 4, False),
        ("decode", 1, False),
        ("mux", 0, False),
    ]
    assert {f.name for f in tmp_path.iterdir()} == {
        "0.mp4",
        "thumbnail.webp",
        "spritesheet.jpg",
        "waveform.png",
        "result.json",
    }


def test_a_file_that_is_not_what_was_asked_for_is_refused(tmp_path: Path) -> None:
    from diptych.media import mp4
    from diptych.server.running.finish import OutputInvalid, check_file

    engine = FakeEngine()
    request = ClipRequest(prompt="a lamp", width=64, height=64, frames=9, fps=24.0, seed=1)
    asked = request.resolve(engine.defaults)
    path = mp4.write(tmp_path / "a.mp4", engine.generate(request))
    check_file(path, asked)
    for change in ({"width": 80}, {"frames": 13}, {"audio": False}, {"fps": 12.0}):
        other = replace(request, **change).resolve(engine.defaults)
        with pytest.raises(OutputInvalid):
            check_file(path, other)


def test_the_number_of_gpus_follows_from_the_layout() -> None:
    assert about(Layout(cfg=2, ulysses=4)) == {"layout": "cfg=2,ulysses=4", "num_gpus": 8}
    assert about(Layout()) == {"layout": "single", "num_gpus": 1}
