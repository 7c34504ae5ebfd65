"""Rank processes: supervised, cancelled, killed, frozen; nothing hangs and none is left behind."""

from __future__ import annotations

import json
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_parity import SMALL

from diptych.engine.engine import Engine
from diptych.engine.order import take
from diptych.errors import Cancelled, LayoutError, MediaError, RankError
from diptych.request import ClipRequest

pytestmark = pytest.mark.distributed

REQUEST = ClipRequest("a red circle", **SMALL)
LONG = replace(REQUEST, steps=400)


@pytest.fixture(scope="module")
def engine(tiny_base):
    with Engine.load(tiny_base, device="cpu", layout="ulysses=2", step_timeout=60) as engine:
        yield engine
        processes = [rank.process for rank in engine._executor._ranks]
    assert all(process.poll() is not None for process in processes)


@pytest.fixture(scope="module")
def clip(engine):
    return engine.generate(REQUEST)


def pids(engine) -> list[int]:
    return [rank.process.pid for rank in engine._executor._ranks]


def again_is_the_same(engine, clip):
    again = engine.generate(REQUEST)
    assert np.array_equal(again.frames, clip.frames)
    assert np.array_equal(again.audio, clip.audio)


def at_step(number, act):
    """A callback that acts once, when step `number` is told."""

    def on_step(progress):
        if progress.stage == "denoise" and progress.done == number:
            act()

    return on_step


def test_progress_and_report_cross_the_process(engine, clip):
    told = []
    previews = []

    def on_step(progress):
        told.append((progress.stage, progress.done))
        if progress.preview is not None:
            previews.append(progress.preview())

    engine.generate(REQUEST, on_step)
    assert [done for stage, done in told if stage == "denoise"] == [0, 1, 2, 3, 3]
    assert np.abs(previews[-1].numpy() - clip.latents["video"]).max() < 1e-5
    assert clip.report["layout"] == "ulysses=2"
    assert clip.report["ranks"] == 2
    assert set(clip.report["seconds"]) == {"text", "denoise", "decode"}


def test_frames_cross_the_process_as_they_are_decoded(engine, clip):
    told = []
    engine.generate(
        replace(REQUEST, frames=37),
        lambda progress: told.append(progress.done) if progress.stage == "decode" else None,
        on_frames=lambda frames: told.append(frames),
    )
    kinds = [len(one) if isinstance(one, np.ndarray) else "told" for one in told]
    assert [kind for kind in kinds if kind != "told"] == [13, 12, 12]
    assert kinds.index(13) < kinds.index("told", kinds.index(13)) < kinds.index(12), "not all at the end"
    parts = []
    engine.generate(REQUEST, on_frames=parts.append)
    assert np.array_equal(np.concatenate(parts), clip.frames)


def test_what_is_raised_where_frames_are_told_is_the_callers_and_the_ranks_stay(engine, clip):
    before = pids(engine)

    def full(frames):
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        engine.generate(REQUEST, on_frames=full)
    assert pids(engine) == before
    again_is_the_same(engine, clip)


def test_cancel_stops_all_ranks_at_the_same_step_and_the_ranks_stay(engine, clip):
    before, steps = pids(engine), []

    def on_step(progress):
        if progress.stage == "denoise":
            steps.append(progress.done)
            if progress.done == 5:
                raise Cancelled("enough")

    start = time.monotonic()
    with pytest.raises(Cancelled, match="enough"):
        engine.generate(LONG, on_step)
    assert steps[-1] == 5
    assert time.monotonic() - start < 30, "400 steps would have taken longer"
    assert pids(engine) == before
    again_is_the_same(engine, clip)


def test_a_user_error_on_a_rank_is_the_callers_and_the_ranks_stay(engine, clip):
    before = pids(engine)
    with pytest.raises(MediaError):
        engine.generate(replace(REQUEST, image=b"not an image"))
    assert pids(engine) == before
    again_is_the_same(engine, clip)


def test_a_fault_in_a_rank_comes_back_with_its_traceback(engine, clip):
    order = take(REQUEST, engine.defaults)
    with pytest.raises(RankError, match="rank 0 failed") as caught:
        engine._executor.generate([replace(order, image="no picture")], None)
    assert "encode_image" in str(caught.value) or "image_tensor" in str(caught.value)
    again_is_the_same(engine, clip)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_fails_that_request_only(engine, clip, victim):
    before = pids(engine)

    def kill():
        os.kill(before[victim], signal.SIGKILL)
        time.sleep(1)  # until the other rank has told of the connection it lost

    with pytest.raises(RankError, match=f"rank {victim} ended: killed by signal 9"):
        engine.generate(LONG, at_step(2, kill))
    assert not any(alive(pid) for pid in before)
    again_is_the_same(engine, clip)


def test_a_rank_without_memory_fails_that_request_with_its_own_traceback(engine, clip):
    victim = pids(engine)[1]
    kilobytes = int(re.search(r"VmSize:\s+(\d+)", Path(f"/proc/{victim}/status").read_text())[1])
    resource.prlimit(victim, resource.RLIMIT_AS, (kilobytes * 1024 + (32 << 20), resource.RLIM_INFINITY))
    with pytest.raises(RankError, match=r"rank 1 failed: .*[Mm]emory") as caught:
        engine.generate(replace(REQUEST, width=1024, height=1024, frames=121, steps=1, guidance=1.0))
    assert "Traceback" in str(caught.value)
    assert not alive(victim)
    again_is_the_same(engine, clip)


def test_ctrl_c_at_any_moment_leaves_no_job_behind_for_the_next_request(engine, clip, monkeypatch):
    """Between two messages, too: a clip of the job before must never be taken for the next one's."""
    listen, heard = engine._executor._next_message, []

    def interrupted():
        message = listen()
        heard.append(message)
        if len(heard) == 3:
            raise KeyboardInterrupt
        return message

    with monkeypatch.context() as patch:
        patch.setattr(engine._executor, "_next_message", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.generate(replace(REQUEST, seed=99), lambda progress: None)
    again_is_the_same(engine, clip)


def test_a_rank_that_freezes_is_found_out(engine, clip, monkeypatch):
    before, patient = pids(engine), engine._executor._options
    assert patient.step_timeout == timedelta(seconds=60), "what the engine was loaded with"
    monkeypatch.setattr(engine._executor, "_options", replace(patient, step_timeout=timedelta(seconds=15)))
    with pytest.raises(RankError, match="no rank said anything for 15 s"):
        engine.generate(LONG, at_step(2, lambda: os.kill(before[1], signal.SIGSTOP)))
    assert not any(alive(pid) for pid in before)
    again_is_the_same(engine, clip)


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_no_rank_outlives_a_parent_that_was_killed(tiny_base):
    script = textwrap.dedent(f"""
        import os, signal  # no guard of __main__: rank processes do not import it
        from diptych.engine.engine import Engine
        from diptych.request import ClipRequest

        def die(progress):
            if progress.stage == "denoise" and progress.done == 1:
                print(*[r.process.pid for r in engine._executor._ranks], flush=True)
                os.kill(os.getpid(), signal.SIGKILL)

        engine = Engine.load({str(tiny_base)!r}, device="cpu", layout="ring=2")
        engine.generate(ClipRequest("x", width=48, height=32, frames=9, steps=400, seed=1), die)
    """)
    file = tiny_base.parent / "killed.py"
    file.write_text(script)
    done = subprocess.run([sys.executable, file], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    ranks = [int(pid) for pid in done.stdout.split()]
    assert len(ranks) == 2
    deadline = time.monotonic() + 10
    while any(alive(pid) for pid in ranks):
        assert time.monotonic() < deadline, "a rank is still there"
        time.sleep(0.1)


def test_torchrun_ranks_join(tiny_base, tmp_path, clip):
    """With their weights in pieces: results of modulations are put together, which may round otherwise."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "diptych", "generate", REQUEST.prompt, "--model", str(tiny_base), "--device", "cpu"]
    command += ["--layout", "ulysses=2,shard=2", "--output", str(tmp_path / "a.mp4"), "--json", "--quiet"]
    command += ["--latents-out", str(tmp_path / "a.safetensors")]
    for name, value in SMALL.items():
        command += [f"--{name}", str(value)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.strip().splitlines()[-1])
    assert (report["ranks"], report["layout"]) == (2, "ulysses=2,shard=2")
    assert np.abs(load_file(tmp_path / "a.safetensors")["video"][0] - clip.latents["video"]).max() <= 2e-5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.mp4", "a.safetensors"]


@pytest.mark.parametrize(
    ("layout", "sentence"),
    [
        ("ulysses=9", "at most 5"),
        ("tensor=4", "5 video and 3 audio heads to split; at most 3"),
        ("shard=2", "it adds no ranks"),
        ("cfg=3", "1, or 2"),
        ("ulises=2", "did you mean ulysses"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_before_anything_starts(tiny_base, layout, sentence):
    with pytest.raises(LayoutError, match=sentence):
        Engine.load(tiny_base, device="cpu", layout=layout)


def test_guidance_cannot_be_split_where_there_is_none(tiny_distilled):
    with pytest.raises(LayoutError, match="no guidance to split"):
        Engine.load(tiny_distilled, device="cpu", layout="cfg=2")
