"""The official `openai` package against a real server: every method of `client.videos` has a defined result."""

from __future__ import annotations

import asyncio
import io
import time
from pathlib import Path

import openai
import pytest
from PIL import Image
from tests.server.serving import Serving

pytestmark = pytest.mark.server
SLOW = "slow=0.05"


@pytest.fixture
def client(served: Serving) -> openai.OpenAI:
    return openai.OpenAI(base_url=served.url + "/v1", api_key="unused", max_retries=0)


def png(width: int = 64, height: int = 64) -> bytes:
    out = io.BytesIO()
    Image.linear_gradient("L").resize((width, height)).convert("RGB").save(out, "PNG")
    return out.getvalue()


def test_create_answers_with_all_keys_of_a_queued_job(client: openai.OpenAI) -> None:
    job = client.videos.create(prompt="a lamp", size="96x64", seconds="4", model="fake")
    assert job.id.startswith("video_")
    assert (job.object, job.status, job.progress, job.size, job.seconds) == ("video", "queued", 0, "96x64", "4")
    assert job.error is None
    assert job.completed_at is None
    assert job.model_extra is not None
    assert job.model_extra["num_frames"] == 97


def test_create_and_poll_returns_the_finished_job(client: openai.OpenAI) -> None:
    job = client.videos.create_and_poll(prompt="a lamp", poll_interval_ms=50)
    assert (job.status, job.progress) == ("completed", 100)
    assert job.expires_at == pytest.approx(job.completed_at + 86_400, abs=1)


def test_polling_a_failing_job_returns_it(client: openai.OpenAI) -> None:
    job = client.videos.create_and_poll(prompt="refuse this", poll_interval_ms=50)
    assert job.status == "failed"
    assert job.error is not None
    assert job.error.code == "invalid_value"


def test_the_server_names_the_polling_interval(client: openai.OpenAI) -> None:
    answer = client.videos.with_raw_response.create(prompt=SLOW)
    assert answer.headers["openai-poll-after-ms"] == "2000"


@pytest.mark.parametrize("form", ["input_reference", "list", "data url", "object"])
def test_an_image_comes_in_any_of_its_forms(client: openai.OpenAI, form: str) -> None:
    import base64

    url = "data:image/png;base64," + base64.b64encode(png()).decode()
    extra = {"data url": {"input_reference": url}, "object": {"input_reference": {"image_url": url}}}
    if form == "input_reference":
        job = client.videos.create(prompt="a lamp", input_reference=("a.png", png(), "image/png"))
    elif form == "list":
        job = client.videos.create(prompt="a lamp", extra_body={}, input_reference=[("a.png", png())])  # type: ignore[arg-type]
    else:
        job = client.videos.create(prompt="a lamp", extra_body=extra[form])
    assert job.model_extra is not None
    assert job.model_extra["task"] == "i2va"
    assert job.size == "64x64"  # the aspect of the image in the area of the checkpoint


def test_nested_extra_fields_reach_the_engine(client: openai.OpenAI) -> None:
    extra = {"extra_params": {"sample_audio": False}, "num_inference_steps": 3, "fps": 12.5, "seed": 7}
    job = client.videos.create_and_poll(prompt="a lamp", extra_body=extra, poll_interval_ms=50)
    assert job.model_extra is not None
    got = [job.model_extra[k] for k in ("has_audio", "num_inference_steps", "fps", "seed")]
    assert got == [False, 3, 12.5, 7]


def test_extra_body_as_a_literal_key_is_unwrapped(client: openai.OpenAI) -> None:
    job = client.videos.create(prompt="a lamp", extra_body={"extra_body": {"num_frames": 13}})
    assert job.model_extra is not None
    assert job.model_extra["num_frames"] == 13


def test_a_json_body_means_the_same(client: openai.OpenAI) -> None:
    headers = {"Content-Type": "application/json"}
    job = client.videos.create(prompt="a lamp", size="96x64", extra_headers=headers)
    assert job.status == "queued"


def test_pages_stay_right_while_jobs_are_deleted_between_them(client: openai.OpenAI) -> None:
    made = [client.videos.create(prompt=f"page {i}").id for i in range(6)]
    page = client.videos.list(limit=2, order="desc")
    got = [v.id for v in page.data]
    client.videos.delete(got[-1])  # the cursor itself
    rest = [v.id for v in client.videos.list(limit=100, order="desc", after=got[-1])]
    assert [*got, *rest][:6] == made[::-1]


def test_listing_goes_over_all_pages(client: openai.OpenAI) -> None:
    made = {client.videos.create(prompt=f"walk {i}").id for i in range(5)}
    assert made <= {v.id for v in client.videos.list(limit=2)}


def test_delete_in_each_state(client: openai.OpenAI) -> None:
    finished = client.videos.create_and_poll(prompt="a lamp", poll_interval_ms=50)
    running = client.videos.create(prompt=SLOW, extra_body={"num_inference_steps": 100})
    queued = client.videos.create(prompt="a lamp")
    while client.videos.retrieve(running.id).status != "in_progress":
        time.sleep(0.02)
    for video in (queued, running, finished):
        gone = client.videos.delete(video.id)
        assert (gone.deleted, gone.object, gone.id) == (True, "video.deleted", video.id)
        with pytest.raises(openai.NotFoundError):
            client.videos.retrieve(video.id)


@pytest.mark.parametrize(
    ("variant", "start"), [("video", b"ftyp"), ("thumbnail", b"WEBP"), ("spritesheet", b"JFIF"), ("waveform", b"PNG")]
)
def test_download_in_all_variants(client: openai.OpenAI, tmp_path: Path, variant: str, start: bytes) -> None:
    job = client.videos.create_and_poll(prompt="a lamp", poll_interval_ms=50)
    content = client.videos.download_content(job.id, variant=variant)  # type: ignore[arg-type]
    assert start in content.read()[:16]
    content.write_to_file(tmp_path / "file")


def test_remix_keeps_everything_but_the_prompt_and_what_is_overridden(client: openai.OpenAI) -> None:
    extra = {"num_inference_steps": 3, "seed": 5, "num_frames": 13}
    image = ("a.png", png(), "image/png")
    source = client.videos.create_and_poll(
        prompt="a lamp", size="96x64", input_reference=image, extra_body=extra, poll_interval_ms=50
    )
    remix = client.videos.remix(source.id, prompt="a candle", extra_body={"fps": 12})
    assert remix.remixed_from_video_id == source.id
    assert (remix.prompt, remix.size) == ("a candle", "96x64")
    assert remix.model_extra is not None
    kept = [remix.model_extra[k] for k in ("num_inference_steps", "seed", "num_frames", "task", "fps")]
    assert kept == [3, 5, 13, "i2va", 12]


def test_remix_needs_a_finished_source(client: openai.OpenAI) -> None:
    source = client.videos.create(prompt=SLOW, extra_body={"num_inference_steps": 100})
    with pytest.raises(openai.BadRequestError) as refused:
        client.videos.remix(source.id, prompt="more")
    assert refused.value.code == "invalid_source_state"
    client.videos.delete(source.id)


def test_edit_of_a_video_by_id_is_a_remix_and_an_upload_is_refused(client: openai.OpenAI) -> None:
    source = client.videos.create_and_poll(prompt="a lamp", poll_interval_ms=50)
    edited = client.videos.edit(prompt="a candle", video=b"", extra_body={"video": {"id": source.id}})
    assert edited.remixed_from_video_id == source.id
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


def test_the_asynchronous_client_works_too(served: Serving) -> None:
    async def use() -> None:
        async with openai.AsyncOpenAI(base_url=served.url + "/v1", api_key="unused") as client:
            job = await client.videos.create_and_poll(prompt="a lamp", poll_interval_ms=50)
            assert job.status == "completed"
            assert len((await client.videos.download_content(job.id)).content) > 1000
            listed = [v.id async for v in client.videos.list(limit=3)]
            assert job.id in listed
            assert (await client.videos.delete(job.id)).deleted
            assert [m.id async for m in client.models.list()] == ["fake"]

    asyncio.run(use())
