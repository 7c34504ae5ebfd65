"""What becomes of jobs: every arrow of the state machine, and what a kill at any moment leaves."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sqlite3
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from tests.server.serving import Serving, processes_with

pytestmark = pytest.mark.server
SLOW = "slow=0.1"
LIFE = 80_000 + os.getpid()
"""Seconds that a process of an engine would live, and what it is known by; other runs on this machine have others."""


@pytest.fixture
def state(tmp_path: Path) -> Path:
    return tmp_path / "state"


def post(serving: Serving, prompt: str, **fields: Any) -> str:
    with serving.client as client:
        answer = client.post("/v1/videos", json={"prompt": prompt, **fields})
    assert answer.status_code == 200, answer.text
    return str(answer.json()["id"])


def files_of(state: Path, video_id: str) -> list[str]:
    found = [p for folder in ("jobs", "work") for p in (state / folder).glob(f"*{video_id}*")]
    return [str(p) for p in found]


# -- a kill in each state -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, dict[str, str]]]:
    """A server with four engines and a job in each state, killed with -9 and started again; the jobs by name."""
    state = tmp_path_factory.mktemp("killed") / "state"
    with Serving(state, "--cancel-timeout", "0.3", "--replicas", "4") as serving, serving.client as client:
        jobs = {"finished": post(serving, f"done before child=1{LIFE}")}
        serving.until(jobs["finished"], "completed")
        for name in ("plain", "published", "cancelled", "deleted"):
            jobs[name] = post(serving, f"{SLOW} deaf=60", num_inference_steps=200)
        for name in ("plain", "published", "cancelled", "deleted"):
            serving.until(jobs[name], "in_progress")  # all four at once
        jobs |= {f"queued {i}": post(serving, f"waiting {i}") for i in range(3)}
        jobs["unreadable"] = post(serving, "unreadable")
        asked = client.post(f"/v1/videos/{jobs['cancelled']}/cancel")
        assert (asked.status_code, asked.json()["status"]) == (200, "in_progress")
        pending = client.delete(f"/v1/videos/{jobs['deleted']}")
        assert (pending.status_code, pending.json()["error"]["code"]) == (409, "cancellation_pending")
        assert pending.headers["retry-after"] == "2"
        serving.kill(signal.SIGKILL)
        # The instant between the rename of the files and the transaction that completes the job.
        shutil.copytree(state / "jobs" / jobs["finished"] / "a1", state / "jobs" / jobs["published"] / "a1")
        with sqlite3.connect(state / "jobs.db") as db:
            db.execute("UPDATE jobs SET spec = 'garbage' WHERE id = ?", (jobs["unreadable"],))
        serving.restart()
        yield serving, jobs


def test_after_a_kill_queued_jobs_run_in_order(killed: tuple[Serving, dict[str, str]]) -> None:
    serving, jobs = killed
    for index in range(3):
        assert serving.until(jobs[f"queued {index}"], "completed")["progress"] == 100
    with sqlite3.connect(serving.state / "jobs.db") as db:
        turns = [db.execute("SELECT turn FROM jobs WHERE id = ?", (jobs[f"queued {i}"],)).fetchone() for i in range(3)]
    assert turns == sorted(turns)


def test_after_a_kill_a_running_job_is_interrupted(killed: tuple[Serving, dict[str, str]]) -> None:
    serving, jobs = killed
    assert serving.until(jobs["plain"], "failed")["error"]["code"] == "interrupted"
    assert processes_with(f"sleep\x001{LIFE}") == [], "what an engine started outlived the server"
    assert not list((serving.state / "work").glob(jobs["plain"] + "*"))


def test_a_clip_published_just_before_the_kill_is_completed(killed: tuple[Serving, dict[str, str]]) -> None:
    serving, jobs = killed
    assert serving.until(jobs["published"], "completed", "failed")["status"] == "completed"
    with serving.client as client:
        for name in ("published", "finished"):
            assert client.get(f"/v1/videos/{jobs[name]}/content").content[4:8] == b"ftyp"


def test_a_wish_to_stop_survives_the_kill(killed: tuple[Serving, dict[str, str]]) -> None:
    serving, jobs = killed
    assert serving.until(jobs["cancelled"], "failed")["error"]["code"] == "cancelled"
    with serving.client as client:
        assert client.get(f"/v1/videos/{jobs['deleted']}").status_code == 404
    assert files_of(serving.state, jobs["deleted"]) == []


def test_an_unreadable_record_is_set_aside_and_the_start_goes_on(killed: tuple[Serving, dict[str, str]]) -> None:
    serving, jobs = killed
    with serving.client as client:
        listed = {v["id"] for v in client.get("/v1/videos").json()["data"]}
    assert listed == set(jobs.values()) - {jobs["unreadable"], jobs["deleted"]}


def test_with_requeue_a_running_job_is_run_again_once_after_a_kill_and_waits_after_a_sigterm(state: Path) -> None:
    with Serving(state, "--on-restart", "requeue", "--replicas", "2") as serving:
        twice, once = post(serving, SLOW, num_inference_steps=60), post(serving, SLOW, num_inference_steps=8)
        for video in (twice, once):
            serving.until(video, "in_progress")
        serving.kill(signal.SIGKILL)
        serving.restart()
        assert serving.until(once, "completed", "failed")["status"] == "completed"
        serving.until(twice, "in_progress")
        serving.kill(signal.SIGKILL)
        serving.restart()
        assert serving.until(twice, "failed")["error"]["code"] == "interrupted"

        # A server that is told to stop says so in time: that attempt does not count.
        last = post(serving, SLOW, num_inference_steps=40)
        serving.until(last, "in_progress")
        assert serving.kill(signal.SIGTERM) == 0
        with sqlite3.connect(state / "jobs.db") as db:
            found = db.execute("SELECT status, attempt FROM jobs WHERE id = ?", (last,)).fetchall()
        assert found == [("queued", 0)]


# -- stopping -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server whose engine writes each finished step to the file `steps` beside the state."""
    folder = tmp_path_factory.mktemp("shared")
    steps = folder / "steps"
    steps.touch()
    flags = ("--stall-timeout", "4", "--max-queue", "50")
    with Serving(folder / "state", *flags, DIPTYCH_TEST_STEPS=str(steps)) as serving:
        yield serving


def steps_of(serving: Serving, prompt: str) -> int:
    lines = (serving.state.parent / "steps").read_text().splitlines()
    return sum(line.startswith(prompt + "|") for line in lines)


@pytest.mark.parametrize("how", ["cancel", "delete"])
def test_a_running_job_stops_at_the_next_step_and_frees_the_engine(shared: Serving, how: str) -> None:
    prompt = f"slow=0.4 {how}"  # long steps: a busy machine may take a while to hear the wish
    with shared.client as client:
        video = post(shared, prompt, num_inference_steps=100)
        while steps_of(shared, prompt) < 1:
            time.sleep(0.01)
        before = steps_of(shared, prompt)
        if how == "delete":
            assert client.delete(f"/v1/videos/{video}").json()["deleted"] is True
            assert steps_of(shared, prompt) - before <= 1, "the engine still ran when the answer came"
            assert client.get(f"/v1/videos/{video}").status_code == 404
            assert files_of(shared.state, video) == []
        else:
            client.post(f"/v1/videos/{video}/cancel")
            job = shared.until(video, "failed")
            assert job["error"]["code"] == "cancelled"
            assert 0 < job["progress"] < 100
        time.sleep(0.5)
        assert steps_of(shared, prompt) - before <= 1
        shared.until(post(shared, "next"), "completed")


def test_a_queued_job_that_is_cancelled_never_starts(shared: Serving) -> None:
    with shared.client as client:
        running = post(shared, SLOW, num_inference_steps=8)
        queued = post(shared, "never")
        assert client.post(f"/v1/videos/{queued}/cancel").json()["error"]["code"] == "cancelled"
        assert client.post(f"/v1/videos/{queued}/cancel").json()["status"] == "failed"
        shared.until(running, "completed")
        shared.until(post(shared, "after"), "completed")
    assert steps_of(shared, "never") == 0


def test_sigterm_finishes_the_running_job_and_leaves_no_process(state: Path) -> None:
    with Serving(state, "--drain-timeout", "20") as serving:
        running = post(serving, SLOW, num_inference_steps=10)
        queued = post(serving, "waiting")
        serving.until(running, "in_progress")
        assert serving.process is not None
        serving.process.send_signal(signal.SIGTERM)
        with serving.client as client:
            deadline = time.monotonic() + 2
            while client.get("/readyz").status_code == 200 and time.monotonic() < deadline:
                time.sleep(0.01)
            refused = client.post("/v1/videos", json={"prompt": "late"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
            assert client.get(f"/v1/videos/{running}").json()["status"] == "in_progress"
        assert serving.process.wait(20) == 0
        assert not processes_with(str(state))
        with sqlite3.connect(state / "jobs.db") as db:
            ends = dict(db.execute("SELECT id, status FROM jobs"))
        assert ends == {running: "completed", queued: "queued"}


# -- engines that fail --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompt", "code"),
    [
        ("die=2", "engine_failed"),
        (f"hang=2 child={LIFE}", "stalled"),
        ("boom", "engine_failed"),
        ("poison", "engine_failed"),
        ("oom", "out_of_memory"),
        ("refuse", "invalid_value"),
        ("flat", "output_invalid"),
        ("short", "output_invalid"),
        ("small", "output_invalid"),
    ],
    ids=lambda word: word.partition(" ")[0],  # the same in every process that collects the tests
)
def test_a_poisoned_job_fails_alone(shared: Serving, prompt: str, code: str) -> None:
    shared.until_ready()
    before = post(shared, "slow=0.5", num_inference_steps=1)  # so that both are queued before the engine fails
    bad, good = post(shared, prompt), post(shared, "good")
    shared.until(before, "completed")
    job = shared.until(bad, "failed")
    assert job["error"]["code"] == code
    assert str(shared.state) not in job["error"]["message"]
    assert code != "stalled" or re.search(r"no progress for \d+ s ", job["error"]["message"])
    assert shared.until(good, "completed")["progress"] == 100
    with shared.client as client:
        answer = client.get(f"/v1/videos/{bad}/content")
        assert (answer.status_code, answer.json()["error"]["code"]) == (422, "generation_failed")
    said = shared.log.read_text()
    assert f"job {bad} failed ({code}) after" in said
    assert "engine 0: the engine is loading (" in said and "loading (the engine" not in said
    assert not list((shared.state / "work").iterdir())
    assert not list((shared.state / "jobs" / bad).glob("a*"))
    assert processes_with(f"sleep\x00{LIFE}") == [], "what a hung engine started outlived it"


def test_readiness_says_when_the_engine_is_being_restarted(shared: Serving) -> None:
    shared.until_ready()
    with shared.client as client:
        bad = post(shared, "die=1")
        shared.until(bad, "failed")
        answer = client.get("/readyz")
        assert (answer.status_code, answer.json()["reason"]) == (503, "the engine is being restarted")
        refused = client.post("/v1/videos", json={"prompt": "too early"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_down")
        assert client.get("/livez").status_code == 200
        assert client.get(f"/v1/videos/{bad}").status_code == 200
        shared.until_ready()


def test_an_engine_that_cannot_load_keeps_the_server_unready_and_says_why(state: Path) -> None:
    serving = Serving(state, checkpoint="broken")
    serving.start(ready=False)
    try:
        with serving.client as client:
            deadline = time.monotonic() + 20
            while "broken" not in (text := client.get("/readyz").text) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert "the checkpoint is broken" in text
    finally:
        serving.kill(signal.SIGTERM)


# -- many, full, old ----------------------------------------------------------------------------------


def test_200_clients_at_once_get_50_places_and_all_accepted_run_in_order(shared: Serving) -> None:
    shared.until_ready()
    running = post(shared, SLOW, num_inference_steps=200)
    shared.until(running, "in_progress")
    answers: list[httpx.Response] = []

    def one(number: int) -> None:
        with shared.client as client:
            answers.append(client.post("/v1/videos", json={"prompt": f"n {number}", "num_inference_steps": 1}))

    threads = [threading.Thread(target=one, args=(i,)) for i in range(200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(a.status_code for a in answers) == {200: 50, 429: 150}
    refused = next(a for a in answers if a.status_code == 429)
    assert refused.json()["error"]["code"] == "queue_full"
    assert int(refused.headers["retry-after"]) >= 1
    accepted = [a.json()["id"] for a in answers if a.status_code == 200]
    with sqlite3.connect(shared.state / "jobs.db") as db:
        prompts = [p for (p,) in db.execute("SELECT json_extract(spec, '$.prompt') FROM jobs ORDER BY seq")]
    order = [prompt for prompt in prompts if prompt.startswith("n ")]
    with shared.client as client:
        client.delete(f"/v1/videos/{running}")
    for video in accepted:
        shared.until(video, "completed", seconds=60)
    steps = (shared.state.parent / "steps").read_text().splitlines()
    assert [line.split("|")[0] for line in steps if line.startswith("n ")] == order


@pytest.fixture(scope="module")
def hasty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server that keeps little and waits little."""
    flags = ("--ttl", "3", "--sweep-every", "0.3", "--queue-timeout", "1", "--sync-timeout", "0.5")
    with Serving(tmp_path_factory.mktemp("hasty") / "state", *flags) as serving:
        yield serving


def test_expired_jobs_vanish_as_one(hasty: Serving) -> None:
    serving, state = hasty, hasty.state
    with serving.client as client:
        video = post(serving, "ephemeral")
        failed = post(serving, "refuse")
        job = serving.until(video, "completed")
        assert job["expires_at"] == pytest.approx(job["completed_at"] + 3, abs=1)
        serving.until(failed, "failed")
        deadline = time.monotonic() + 10
        while client.get(f"/v1/videos/{failed}").status_code != 404 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert client.get(f"/v1/videos/{video}/content").status_code == 404
        assert client.get("/v1/videos").json()["data"] == []
        while (left := files_of(state, video) + files_of(state, failed)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == []


def test_waits_have_their_limits(hasty: Serving) -> None:
    serving = hasty
    with serving.client as client:
        running = post(serving, SLOW, num_inference_steps=100)
        late = client.post("/v1/videos/sync", json={"prompt": "too late"})
        assert (late.status_code, late.json()["error"]["code"]) == (504, "sync_timeout")
        assert late.headers["x-should-retry"] == "false"
        waiting = late.json()["error"]["video_id"]
        assert serving.until(waiting, "failed")["error"]["code"] == "queue_timeout"
        assert serving.until(running, "in_progress")["status"] == "in_progress"


def test_a_full_disk_refuses_new_jobs_fails_the_running_one_and_hurts_nothing_else(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("mounting a tmpfs needs root")
    try:
        with Serving(disk / "state", "--min-free-mib", "0") as serving, serving.client as client:
            before = post(serving, "before")
            serving.until(before, "completed")
            video = post(serving, SLOW, num_inference_steps=10, size="256x256", num_frames=49, output_compression=0)
            serving.until(video, "in_progress")
            filler = disk / "filler"
            filler.write_bytes(b"\0" * (shutil.disk_usage(disk).free - (100 << 10)))
            job = serving.until(video, "failed")
            assert job["error"]["code"] == "storage_failed"
            assert not list((disk / "state" / "work").iterdir())
            free = client.get("/v1/videos/" + before)
            assert free.json()["status"] == "completed"
            filler.unlink()
            serving.until(post(serving, "after"), "completed")
        with Serving(disk / "state", "--min-free-mib", "100") as serving, serving.client as client:
            refused = client.post("/v1/videos", json={"prompt": "no room"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "storage_full")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
