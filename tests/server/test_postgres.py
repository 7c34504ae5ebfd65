"""Two API processes on one PostgreSQL and one state folder: the same jobs from either, each job run once."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.server.serving import Serving
from tests.server.test_events import events


def find_tools() -> Path | None:
    found = shutil.which("initdb")
    folders = [Path(found).resolve().parent] if found else sorted(Path("/usr/lib/postgresql").glob("*/bin"))
    return folders[-1] if folders else None


BIN = find_tools()
pytestmark = [pytest.mark.server, pytest.mark.skipif(BIN is None, reason="no PostgreSQL is installed")]


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    """The URL of a fresh PostgreSQL, which refuses to run as root."""
    assert BIN is not None
    folder = Path(tempfile.mkdtemp(prefix="diptych-pg-"))
    as_user: list[str] = []
    if os.geteuid() == 0:
        user = pwd.getpwnam("postgres")
        os.chown(folder, user.pw_uid, user.pw_gid)
        as_user = ["runuser", "-u", "postgres", "--"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    data = folder / "data"
    subprocess.run(
        [*as_user, BIN / "initdb", "-D", data, "-A", "trust", "-U", "diptych", "-N"], check=True, capture_output=True
    )
    command = [
        *as_user,
        BIN / "postgres",
        "-D",
        data,
        "-p",
        str(port),
        "-k",
        folder,
        "-c",
        "listen_addresses=127.0.0.1",
        "-F",
    ]
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, stderr=log, stdout=log)
    for _ in range(200):
        ready = subprocess.run(
            [BIN / "pg_isready", "-h", "127.0.0.1", "-p", str(port), "-U", "diptych", "-q"], check=False
        )
        if ready.returncode == 0:
            break
        time.sleep(0.05)
    yield f"postgresql://diptych@127.0.0.1:{port}/postgres"
    subprocess.run([*as_user, BIN / "pg_ctl", "stop", "-D", data, "-m", "immediate"], check=True, capture_output=True)
    server.wait(20)
    shutil.rmtree(folder)


def test_two_hosts_share_jobs_and_each_job_runs_once(database: str, tmp_path: Path) -> None:
    state, steps = tmp_path / "shared", tmp_path / "steps"
    first = Serving(state, "--database", database, "--max-queue", "64", DIPTYCH_TEST_STEPS=str(steps))
    second = Serving(state, "--database", database, "--max-queue", "64", DIPTYCH_TEST_STEPS=str(steps))
    second.log = tmp_path / "second.log"
    try:
        first.start(ready=False)
        second.start()
        first.until_ready()
        assert first.process is not None
        with first.client as one, second.client as two:
            made = []
            for number in range(12):
                client = (one, two)[number % 2]
                fields = {"prompt": f"job {number} slow=0.05", "num_inference_steps": 2}
                made.append(client.post("/v1/videos", json=fields).json()["id"])
            for video in made:
                assert first.until(video, "completed")["progress"] == 100
                assert two.get(f"/v1/videos/{video}/content").content[4:8] == b"ftyp"
            ran = Counter(line for line in steps.read_text().splitlines())
            assert len(ran) == 24
            assert set(ran.values()) == {1}

            # What one host runs, the other can follow, cancel and delete.
            running = [
                one.post("/v1/videos", json={"prompt": f"slow=0.1 {n}", "num_inference_steps": 150}) for n in range(2)
            ]
            ids = [answer.json()["id"] for answer in running]
            for video in ids:
                first.until(video, "in_progress")
            for client in (one, two):
                seen = [name for (name, *_), _ in zip(events(client, ids[0]), range(4), strict=False)]
                assert seen[0] == "snapshot"
                assert "progress" in seen
            for client, video in ((two, ids[0]), (one, ids[1])):
                assert client.delete(f"/v1/videos/{video}").json()["deleted"] is True
            assert [one.get(f"/v1/videos/{v}").status_code for v in ids] == [404, 404]

            # A host that dies leaves its running job failed and its queued ones to the other.
            ids = [
                one.post("/v1/videos", json={"prompt": f"slow=0.1 {n}", "num_inference_steps": 30}).json()["id"]
                for n in range(2)
            ]
            for video in ids:
                first.until(video, "in_progress")
            queued = one.post("/v1/videos", json={"prompt": "left behind"}).json()["id"]
            first.process.kill()
            first.process.wait(10)
            ends = [second.until(video, "completed", "failed") for video in ids]
            assert sorted(e["status"] for e in ends) == ["completed", "failed"]
            assert next(e for e in ends if e["error"])["error"]["code"] == "interrupted"
            second.until(queued, "completed")
    finally:
        for serving in (first, second):
            if serving.alive:
                assert serving.process is not None
                serving.process.send_signal(signal.SIGTERM)
                serving.process.wait(20)


def test_an_api_host_without_engines_serves_what_another_one_makes(database: str, tmp_path: Path) -> None:
    state = tmp_path / "shared"
    api = Serving(state, "--database", database, "--replicas", "0")
    api.log = tmp_path / "api.log"
    api.start(ready=False)
    try:
        with api.client as client:
            refused = client.post("/v1/videos", json={"prompt": "nobody is there"})
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
            with Serving(state, "--database", database) as engine:
                api.until_ready()
                video = client.post("/v1/videos", json={"prompt": "made elsewhere"}).json()["id"]
                assert api.until(video, "completed")["progress"] == 100
                assert client.get(f"/v1/videos/{video}/content").status_code == 200
                assert client.get("/v1/models").json()["data"][0]["diptych"]["defaults"]["width"] == 96
                assert api.process is not None
                api.process.send_signal(signal.SIGTERM)
                assert api.process.wait(20) == 0
                assert engine.alive
    finally:
        if api.alive:
            api.process.kill()  # type: ignore[union-attr]
