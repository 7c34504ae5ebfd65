"""The real engine and the tiny checkpoint behind a real server, through the official client."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import av
import openai
import pytest
from tests.server.bad_requests import PNG
from tests.server.serving import Serving
from tests.server.test_events import events

from diptych.media.mp4 import read_clip, read_report

pytestmark = pytest.mark.server
SMALL: dict[str, Any] = {"num_frames": 9, "num_inference_steps": 2, "seed": 11}


@pytest.fixture
def client(tiny_served: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=tiny_served.url + "/v1", api_key="unused", max_retries=0)


def make(client: openai.OpenAI, **fields: Any) -> openai.types.Video:
    job = client.videos.create_and_poll(
        prompt="waves at dusk", size="64x96", extra_body=SMALL | fields, poll_interval_ms=50
    )
    assert job.status == "completed", job.error
    return job


@pytest.mark.parametrize(
    ("fields", "frames", "rate", "sound"),
    [
        ({}, 9, 24, True),
        ({"num_frames": 12, "fps": 12}, 13, 12, True),
        ({"sample_audio": False}, 9, 24, False),
    ],
)
def test_the_file_answers_the_request(
    client: openai.OpenAI, fields: dict[str, Any], frames: int, rate: float, sound: bool
) -> None:
    job = make(client, **fields)
    with av.open(io.BytesIO(client.videos.download_content(job.id).content)) as file:
        video = file.streams.video[0]
        assert (video.width, video.height, video.codec_context.name) == (64, 96, "h264")
        assert video.average_rate == rate
        assert sum(1 for _ in file.decode(video)) == frames
        assert float(video.duration * video.time_base) == pytest.approx(frames / rate, abs=1e-3)
        assert len(file.streams.audio) == int(sound)
        if sound:
            audio = file.streams.audio[0]
            assert (audio.rate, audio.channels, audio.codec_context.name) == (44_100, 1, "aac")
            assert float(audio.duration * audio.time_base) == pytest.approx(frames / rate, abs=1 / rate)
    assert job.model_extra is not None
    assert job.model_extra["inference_time_s"] > 0
    assert {"text", "denoise", "decode"} <= set(job.model_extra["stage_durations"])


def test_an_image_and_several_outputs(client: openai.OpenAI, tmp_path: Path) -> None:
    job = client.videos.create_and_poll(
        prompt="waves", input_reference=("a.png", PNG), size="64x64", extra_body=SMALL | {"n": 2}, poll_interval_ms=50
    )
    assert job.status == "completed", job.error
    seeds = []
    for variant in ("0", "1"):
        file = tmp_path / f"{variant}.mp4"
        client.videos.download_content(job.id, variant=variant).write_to_file(file)  # type: ignore[arg-type]
        seeds.append(read_report(file)["request"]["seed"])
    assert seeds == [11, 12]


def test_the_same_request_and_seed_give_the_same_clip(client: openai.OpenAI, tmp_path: Path) -> None:
    clips = []
    for index in range(2):
        file = tmp_path / f"{index}.mp4"
        client.videos.download_content(make(client).id).write_to_file(file)
        clips.append(read_clip(file))
    assert (clips[0].frames == clips[1].frames).all()
    assert clips[0].audio is not None
    assert clips[1].audio is not None
    assert (clips[0].audio == clips[1].audio).all()


def test_a_running_clip_shows_previews_and_stops_when_told(tiny_served: Serving) -> None:
    with tiny_served.client as client, tiny_served.client as other:
        fields = {"prompt": "waves", "size": "64x96", "num_frames": 9, "num_inference_steps": 200}
        video = client.post("/v1/videos", json=fields).json()["id"]
        seen = 0
        for name, data, *_ in events(client, video):
            if name == "preview":
                assert data["image"].startswith("data:image/jpeg;base64,")
                seen += 1
                if seen == 2:
                    assert other.post(f"/v1/videos/{video}/cancel").status_code == 200
        assert name == "failed"
        assert data["error"]["code"] == "cancelled"
        assert data["progress"] < 90
        assert seen >= 2


def test_delete_frees_the_engine_for_the_next_job(client: openai.OpenAI) -> None:
    video = client.videos.create(prompt="waves", size="64x96", extra_body=SMALL | {"num_inference_steps": 200})
    while client.videos.retrieve(video.id).status != "in_progress":
        pass
    assert client.videos.delete(video.id).deleted
    make(client)


def test_a_request_that_the_engine_refuses_fails_alone(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.videos.create(prompt="waves", size="64x96", extra_body={"num_frames": 509, "fps": 10})
    assert "sound of at most" in refused.value.message
    make(client)
