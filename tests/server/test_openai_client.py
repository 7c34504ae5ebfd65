"""The official `openai` package against a real server with the real engine: each method has a defined result."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import Iterator
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
QUICK: dict[str, Any] = {"size": "64x64", "extra_body": {"num_frames": 5, "num_inference_steps": 1}}
LONG: dict[str, Any] = {"size": "64x64", "extra_body": {"num_frames": 49, "num_inference_steps": 200}}


@pytest.fixture(scope="module")
def client(tiny_served: Serving) -> openai.OpenAI:
    """One for all: each would load all certificates anew."""
    return openai.OpenAI(base_url=tiny_served.url + "/v1", api_key="unused", max_retries=0)


@pytest.fixture
def running(client: openai.OpenAI) -> Iterator[str]:
    """The id of a job that is being denoised, and holds the engine until the test is over."""
    video = client.videos.create(prompt="waves", **LONG)
    while client.videos.retrieve(video.id).status != "in_progress":
        time.sleep(0.02)
    yield video.id
    if any(v.id == video.id for v in client.videos.list(limit=100)):
        client.videos.delete(video.id)


@pytest.fixture(scope="module")
def finished(client: openai.OpenAI) -> openai.types.Video:
    """A finished clip with everything set, also a picture."""
    extra = {"num_inference_steps": 2, "seed": 5, "num_frames": 9}
    job = client.videos.create_and_poll(
        prompt="a lamp", size="96x64", input_reference=("a.png", PNG, "image/png"), extra_body=extra,
        poll_interval_ms=50,
    )  # fmt: skip
    assert job.status == "completed", job.error
    return job


def queued(client: openai.OpenAI, **fields: Any) -> openai.types.Video:
    """Queue a clip, behind one that runs, and take it out of the queue again: of interest is the answer."""
    job = client.videos.create(prompt="a lamp", **fields)
    client.videos.delete(job.id)
    return job


def test_create_answers_with_all_keys_of_a_queued_job(client: openai.OpenAI, running: str) -> None:
    job = queued(client, size="96x64", seconds="4", model="tiny")
    assert job.id.startswith("video_")
    assert (job.object, job.status, job.progress, job.size, job.seconds) == ("video", "queued", 0, "96x64", "4")
    assert job.error is None
    assert job.completed_at is None
    assert job.model_extra is not None
    assert job.model_extra["num_frames"] == 97


def test_create_and_poll_returns_the_finished_job(client: openai.OpenAI) -> None:
    job = client.videos.create_and_poll(prompt="a lamp", poll_interval_ms=50, **QUICK)
    assert (job.status, job.progress) == ("completed", 100)
    assert job.expires_at == pytest.approx(job.completed_at + 86_400, abs=1)


def test_polling_a_failing_job_returns_it(client: openai.OpenAI, tiny_served: Serving, running: str) -> None:
    """A picture that the disk has spoilt while its job waited: the engine refuses it, and is there for the next."""
    job = client.videos.create(prompt="a lamp", input_reference=("a.png", PNG), **QUICK)
    (tiny_served.state / "jobs" / job.id / "input").write_bytes(b"spoilt")
    client.videos.delete(running)
    ended = client.videos.poll(job.id, poll_interval_ms=50)
    assert ended.status == "failed"
    assert ended.error is not None
    assert ended.error.code == "invalid_value"
    assert client.videos.create_and_poll(prompt="a lamp", poll_interval_ms=50, **QUICK).status == "completed"


def test_a_job_whose_picture_is_gone_fails_instead_of_going_on_without(
    client: openai.OpenAI, tiny_served: Serving, running: str
) -> None:
    job = client.videos.create(prompt="a lamp", input_reference=("a.png", PNG), **QUICK)
    (tiny_served.state / "jobs" / job.id / "input").unlink()
    client.videos.delete(running)
    ended = client.videos.poll(job.id, poll_interval_ms=50)
    assert ended.error is not None
    assert (ended.status, ended.error.code) == ("failed", "storage_failed")


def test_the_server_names_the_polling_interval(client: openai.OpenAI, running: str) -> None:
    answer = client.videos.with_raw_response.retrieve(running)
    assert answer.headers["openai-poll-after-ms"] == "2000"


@pytest.mark.parametrize("form", ["input_reference", "list", "data url", "object"])
def test_an_image_comes_in_any_of_its_forms(client: openai.OpenAI, running: str, form: str) -> None:
    url = "data:image/png;base64," + base64.b64encode(PNG).decode()
    fields: dict[str, Any] = {
        "input_reference": {"input_reference": ("a.png", PNG, "image/png")},
        "list": {"input_reference": [("a.png", PNG)]},
        "data url": {"extra_body": {"input_reference": url}},
        "object": {"extra_body": {"input_reference": {"image_url": url}}},
    }[form]
    job = queued(client, **fields)
    assert job.model_extra is not None
    assert job.model_extra["task"] == "i2va"
    width, height = (int(side) for side in job.size.split("x"))
    assert width == height, "the aspect of the image"


def test_nested_extra_fields_reach_the_engine(client: openai.OpenAI) -> None:
    nested = {"sample_audio": False, "num_frames": 5}
    extra = {"extra_params": nested, "num_inference_steps": 2, "fps": 12.5, "seed": 7, "return_stage_metrics": True}
    job = client.videos.create_and_poll(prompt="a lamp", size="64x64", extra_body=extra, poll_interval_ms=50)
    assert job.model_extra is not None
    got = [job.model_extra[k] for k in ("has_audio", "num_inference_steps", "fps", "seed", "num_frames")]
    assert got == [False, 2, 12.5, 7, 5]
    ran = job.model_extra["metrics"]["outputs"][0]["request"]
    assert [ran[k] for k in ("audio", "steps", "fps", "seed", "frames")] == got


def test_extra_body_as_a_literal_key_is_unwrapped(client: openai.OpenAI, running: str) -> None:
    job = queued(client, extra_body={"extra_body": {"num_frames": 13}})
    assert job.model_extra is not None
    assert job.model_extra["num_frames"] == 13


def test_a_json_body_means_the_same(client: openai.OpenAI, running: str) -> None:
    job = queued(client, size="96x64", extra_headers={"Content-Type": "application/json"})
    assert (job.status, job.size) == ("queued", "96x64")


def test_pages_stay_right_while_jobs_are_deleted_between_them(client: openai.OpenAI, running: str) -> None:
    made = [client.videos.create(prompt=f"page {i}", **QUICK).id for i in range(6)]
    page = client.videos.list(limit=2, order="desc")
    got = [v.id for v in page.data]
    client.videos.delete(got[-1])  # the cursor itself
    rest = [v.id for v in client.videos.list(limit=100, order="desc", after=got[-1])]
    assert [*got, *rest][:6] == made[::-1]
    assert set(made) - {got[-1]} <= {v.id for v in client.videos.list(limit=2)}, "the client walks over all pages"
    for video in set(made) - {got[-1]}:
        client.videos.delete(video)


def test_delete_in_each_state(client: openai.OpenAI, running: str) -> None:
    waiting = client.videos.create(prompt="a lamp", **QUICK).id
    assert client.videos.retrieve(waiting).status == "queued"
    assert client.videos.retrieve(running).status == "in_progress"
    for video in (waiting, running):
        assert client.videos.delete(video).deleted
    done = client.videos.create_and_poll(prompt="a lamp", poll_interval_ms=50, **QUICK)
    assert done.status == "completed", "the engine is free at once"
    gone = client.videos.delete(done.id)
    assert (gone.deleted, gone.object, gone.id) == (True, "video.deleted", done.id)
    for video in (waiting, running, done.id):
        with pytest.raises(openai.NotFoundError):
            client.videos.retrieve(video)


@pytest.mark.parametrize(
    ("variant", "start"),
    [(None, b"ftyp"), ("video", b"ftyp"), ("thumbnail", b"WEBP"), ("spritesheet", b"JFIF"), ("waveform", b"PNG")],
)
def test_download_in_all_variants(
    client: openai.OpenAI, finished: openai.types.Video, tmp_path: Path, variant: str | None, start: bytes
) -> None:
    asked: dict[str, Any] = {} if variant is None else {"variant": variant}
    content = client.videos.download_content(finished.id, **asked)
    content.write_to_file(tmp_path / "file")
    assert start in (tmp_path / "file").read_bytes()[:16]


def test_remix_keeps_everything_but_the_prompt_and_what_is_overridden(
    client: openai.OpenAI, finished: openai.types.Video
) -> None:
    remix = client.videos.remix(finished.id, prompt="a candle", extra_body={"fps": 12})
    assert remix.remixed_from_video_id == finished.id
    assert (remix.prompt, remix.size) == ("a candle", "96x64")
    assert remix.model_extra is not None
    kept = [remix.model_extra[k] for k in ("num_inference_steps", "seed", "num_frames", "task", "fps")]
    assert kept == [2, 5, 9, "i2va", 12]
    assert client.videos.poll(remix.id, poll_interval_ms=50).status == "completed"


def test_remix_needs_a_finished_source(client: openai.OpenAI, running: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.videos.remix(running, prompt="more")
    assert refused.value.code == "invalid_source_state"


def test_edit_of_a_video_by_id_is_a_remix_and_an_upload_is_refused(
    client: openai.OpenAI, finished: openai.types.Video
) -> None:
    edited = client.videos.edit(prompt="a candle", video=b"", extra_body={"video": {"id": finished.id}})
    client.videos.delete(edited.id)
    assert edited.remixed_from_video_id == finished.id
    with pytest.raises(openai.BadRequestError) as refused:
        client.videos.edit(prompt="a candle", video=("a.mp4", b"123"))
    assert refused.value.code == "unsupported_operation"


def test_what_this_model_cannot_do_is_refused_once(client: openai.OpenAI) -> None:
    patient = client.with_options(max_retries=2)
    with pytest.raises(openai.BadRequestError) as refused:
        patient.videos.extend(prompt="more", seconds="4", video=b"", extra_body={"video": {"id": "video_x"}})
    assert refused.value.code == "unsupported_operation"
    with pytest.raises(openai.BadRequestError):
        patient.videos.create_character(name="Ann", video=b"123")
    with pytest.raises(openai.NotFoundError) as unknown:
        patient.videos.get_character("char_1")
    assert unknown.value.code == "character_not_found"


def test_refusals_carry_the_field_and_a_code(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.videos.create(prompt="a lamp", size="100x64")
    assert (refused.value.code, refused.value.param, refused.value.type) == (
        "invalid_value",
        "size",
        "invalid_request_error",
    )
    assert "96x64" in refused.value.message


def test_the_asynchronous_client_works_too(tiny_served: Serving) -> None:
    async def use() -> None:
        async with openai.AsyncOpenAI(base_url=tiny_served.url + "/v1", api_key="unused") as client:
            job = await client.videos.create_and_poll(prompt="a lamp", poll_interval_ms=50, **QUICK)
            assert job.status == "completed"
            assert len((await client.videos.download_content(job.id)).content) > 1000
            listed = [v.id async for v in client.videos.list(limit=3)]
            assert job.id in listed
            assert (await client.videos.delete(job.id)).deleted
            assert [m.id async for m in client.models.list()] == ["tiny"]

    asyncio.run(use())


# -- what the engine made ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "frames", "rate", "sound"),
    [
        ({"num_frames": 9}, 9, 24, True),
        ({"num_frames": 12, "fps": 12}, 13, 12, True),
        ({"num_frames": 9, "sample_audio": False}, 9, 24, False),
    ],
)
def test_the_file_answers_the_request(
    client: openai.OpenAI, fields: dict[str, Any], frames: int, rate: float, sound: bool
) -> None:
    extra = {"num_inference_steps": 2} | fields
    job = client.videos.create_and_poll(prompt="waves", size="64x96", extra_body=extra, poll_interval_ms=50)
    assert job.status == "completed", job.error
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


def test_each_output_has_its_own_seed_and_the_same_seed_gives_the_same_clip(
    client: openai.OpenAI, tmp_path: Path
) -> None:
    clips = {}
    for seed, outputs in ((11, 2), (12, 1)):
        extra = {"num_frames": 5, "num_inference_steps": 2, "seed": seed, "n": outputs}
        job = client.videos.create_and_poll(
            prompt="waves", input_reference=("a.png", PNG), size="64x64", extra_body=extra, poll_interval_ms=50
        )
        assert job.status == "completed", job.error
        for index in range(outputs):
            file = tmp_path / f"{seed}-{index}.mp4"
            client.videos.download_content(job.id, variant=str(index)).write_to_file(file)  # type: ignore[arg-type]
            assert read_report(file)["request"]["seed"] == seed + index
            clips[seed, index] = read_clip(file)
    first, second, again = clips[11, 0], clips[11, 1], clips[12, 0]
    assert (second.frames == again.frames).all()
    assert (second.audio == again.audio).all()
    assert (first.frames != second.frames).any()


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


def test_a_length_that_no_sound_can_have_is_refused_before_it_is_queued(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.videos.create(prompt="waves", size="64x96", extra_body={"num_frames": 509, "fps": 10})
    assert "sound of at most" in refused.value.message


@pytest.mark.parametrize(
    ("asked", "cached"), [({}, False), ({"quality": "high"}, True), ({"enable_cache_dit": True}, True)]
)
def test_the_step_cache_is_for_jobs_that_ask_for_it_and_the_job_says_so(
    client: openai.OpenAI, asked: dict[str, Any], cached: bool
) -> None:
    extra = {"num_frames": 5, "num_inference_steps": 6, "return_stage_metrics": True} | asked
    job = client.videos.create_and_poll(prompt="waves", size="64x64", extra_body=extra, poll_interval_ms=50)
    assert job.model_extra is not None
    ran = job.model_extra["metrics"]["outputs"][0]
    assert ("step_cache" in job.model_extra["warnings"], job.quality == "high", "cache" in ran) == (cached,) * 3
    assert (ran["forwards"]["computed"] < ran["forwards"]["total"]) == cached
