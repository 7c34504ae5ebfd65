"""Server-sent events: what is told, in which order, how soon, and when the stream ends."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx2 as httpx
import pytest
from tests.server.serving import Serving

pytestmark = pytest.mark.server


def events(client: httpx.Client, video: str, **headers: str) -> Iterator[tuple[str, dict[str, Any], int, float]]:
    with client.stream("GET", f"/v1/videos/{video}/events", headers=headers) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        name, number = "", 0
        for line in answer.iter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("id: "):
                number = int(line[4:])
            elif line.startswith("data: "):
                yield name, json.loads(line[6:]), number, time.monotonic()


def submit(client: httpx.Client, prompt: str, **fields: Any) -> str:
    return str(client.post("/v1/videos", json={"prompt": prompt, **fields}).json()["id"])


def test_a_job_is_told_from_snapshot_over_progress_and_previews_to_its_end(api: httpx.Client) -> None:
    video = submit(api, "slow=0.15", num_inference_steps=8)
    told = list(events(api, video))
    names = [name for name, *_ in told]
    assert names[0] == "snapshot"
    assert names[-1] == "completed"
    assert {"progress", "preview"} <= set(names)
    assert [number for *_, number, _ in told] == list(range(1, len(told) + 1))
    progress = [data["progress"] for name, data, *_ in told if name != "preview"]
    assert progress == sorted(progress)
    assert progress[-1] == 100
    steps = [data["step"] for name, data, *_ in told if name == "progress" and data["stage"] == "denoise"]
    assert steps == sorted(steps)
    assert len(steps) >= 3
    assert all(data["total_steps"] == 8 for name, data, *_ in told if name == "progress" and data["stage"] == "denoise")
    pictures = [data["image"] for name, data, *_ in told if name == "preview"]
    assert all(p.startswith("data:image/jpeg;base64,") for p in pictures)
    assert told[-1][1]["status"] == "completed"


def test_progress_comes_at_most_four_times_a_second(api: httpx.Client) -> None:
    video = submit(api, "slow=0.02", num_inference_steps=50)
    times = [at for name, _, _, at in events(api, video) if name == "progress"]
    assert len(times) <= (times[-1] - times[0]) / 0.25 + 2


def test_the_seconds_left_are_told_while_denoising(api: httpx.Client) -> None:
    video = submit(api, "slow=0.1", num_inference_steps=10)
    left = [data["eta_s"] for name, data, *_ in events(api, video) if name == "progress" and data["stage"] == "denoise"]
    assert [v for v in left if v] == sorted((v for v in left if v), reverse=True)


def test_a_job_that_has_ended_gives_a_snapshot_and_its_end(served: Serving, api: httpx.Client) -> None:
    video = submit(api, "refuse")
    served.until(video, "failed")
    told = list(events(api, video))
    assert [name for name, *_ in told] == ["snapshot", "failed"]
    assert told[1][1]["error"]["code"] == "invalid_value"


def test_the_last_event_id_is_counted_on(api: httpx.Client) -> None:
    video = submit(api, "a lamp")
    assert next(events(api, video, **{"Last-Event-ID": "41"}))[2] == 42


def test_a_deleted_job_ends_the_stream(served: Serving) -> None:
    with served.client as client, served.client as other:
        video = submit(client, "slow=0.1", num_inference_steps=100)
        stream = events(client, video)
        assert next(stream)[0] == "snapshot"
        timer = threading.Timer(0.3, lambda: other.delete(f"/v1/videos/{video}"))
        timer.start()
        names = [name for name, *_ in stream]
        timer.join()
        assert names[-1] == "deleted"


def test_the_place_in_the_queue_is_told(served: Serving, api: httpx.Client) -> None:
    running = submit(api, "slow=0.1", num_inference_steps=100)
    served.until(running, "in_progress")
    first, second = submit(api, "one"), submit(api, "two")
    assert api.get(f"/v1/videos/{first}").json()["queue_position"] == 0
    assert next(events(api, second))[1]["queue_position"] == 1
    for video in (second, first, running):
        api.delete(f"/v1/videos/{video}")


def test_sync_answers_with_the_file_and_how_it_was_made(api: httpx.Client) -> None:
    answer = api.post("/v1/videos/sync", json={"prompt": "a lamp", "seed": 3})
    assert answer.status_code == 200
    assert answer.content[4:8] == b"ftyp"
    assert answer.headers["x-seed"] == "3"
    assert (answer.headers["x-num-frames"], answer.headers["x-fps"]) == ("9", "24")
    assert json.loads(answer.headers["x-stage-durations"])["denoise"] == 0.1
    job = api.get("/v1/videos/" + answer.headers["x-video-id"]).json()
    assert job["status"] == "completed"


def test_sync_tells_a_failure_and_takes_one_output(api: httpx.Client) -> None:
    failed = api.post("/v1/videos/sync", json={"prompt": "flat"})
    assert (failed.status_code, failed.json()["error"]["code"]) == (422, "generation_failed")
    assert "flat" in failed.json()["error"]["message"]
    two = api.post("/v1/videos/sync", json={"prompt": "a lamp", "n": 2})
    assert (two.status_code, two.json()["error"]["param"]) == (400, "n")


def test_metrics_count_what_happened(api: httpx.Client) -> None:
    api.post("/v1/videos/sync", json={"prompt": "a lamp"})
    text = api.get("/metrics").text
    for name in (
        "diptych_requests_running 0.0",
        'diptych_requests_total{status="completed",task="t2va"}',
        'diptych_jobs{status="completed"}',
        'diptych_stage_seconds_count{stage="denoise"}',
        "diptych_denoise_step_seconds_count",
        "diptych_queue_wait_seconds_count",
        "diptych_request_latency_seconds_count",
        'diptych_output_rejected_total{reason="check"}',
        'diptych_jobs_failed_total{code="output_invalid"}',
        "diptych_store_bytes",
        'diptych_engine_ready{engine="0"} 1.0',
        'diptych_engine_heartbeat_age_seconds{engine="0"}',
    ):
        assert name in text, name
