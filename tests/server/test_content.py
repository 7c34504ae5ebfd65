"""The bytes of a video: ranges, validators, heads, and downloads that outlive a deletion."""

from __future__ import annotations

import httpx2 as httpx
import pytest
from tests.server.serving import Serving

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def video(served: Serving) -> str:
    with served.client as client:
        job = client.post("/v1/videos", json={"prompt": "a lamp", "n": 2}).json()
    served.until(job["id"], "completed")
    return f"/v1/videos/{job['id']}/content"


@pytest.fixture(scope="module")
def whole(served: Serving, video: str) -> bytes:
    with served.client as client:
        return client.get(video).content


@pytest.mark.parametrize(
    ("asked", "first", "last"),
    [
        ("bytes=0-0", 0, 0),
        ("bytes=10-19", 10, 19),
        ("bytes=100-", 100, None),
        ("bytes=-7", -7, None),
        ("bytes=5-99999999", 5, None),
    ],
)
def test_one_range_is_answered_in_part(
    api: httpx.Client, video: str, whole: bytes, asked: str, first: int, last: int | None
) -> None:
    answer = api.get(video, headers={"Range": asked})
    wanted = whole[first:] if last is None else whole[first : last + 1]
    start = first % len(whole)
    assert answer.status_code == 206
    assert answer.content == wanted
    assert answer.headers["content-range"] == f"bytes {start}-{start + len(wanted) - 1}/{len(whole)}"
    assert int(answer.headers["content-length"]) == len(wanted)


@pytest.mark.parametrize("asked", ["bytes=0-1,5-6", "items=0-1", "bytes=x-y", "bytes=9-3", "bytes=-"])
def test_several_or_meaningless_ranges_get_the_whole(api: httpx.Client, video: str, whole: bytes, asked: str) -> None:
    answer = api.get(video, headers={"Range": asked})
    assert (answer.status_code, answer.content) == (200, whole)


@pytest.mark.parametrize("asked", ["bytes=99999999-", "bytes=-0"])
def test_a_range_beyond_the_end_is_refused(api: httpx.Client, video: str, whole: bytes, asked: str) -> None:
    answer = api.get(video, headers={"Range": asked})
    assert (answer.status_code, answer.json()["error"]["code"]) == (416, "range_not_satisfiable")
    assert answer.headers["content-range"] == f"bytes */{len(whole)}"


def test_the_etag_saves_a_download_and_guards_a_resumed_one(api: httpx.Client, video: str, whole: bytes) -> None:
    etag = api.head(video).headers["etag"]
    assert api.get(video, headers={"If-None-Match": etag}).status_code == 304
    assert api.get(video, headers={"If-None-Match": '"other"'}).status_code == 200
    same = api.get(video, headers={"Range": "bytes=0-9", "If-Range": etag})
    other = api.get(video, headers={"Range": "bytes=0-9", "If-Range": '"other"'})
    assert (same.status_code, other.status_code) == (206, 200)
    assert other.content == whole


def test_head_tells_what_get_would_send(api: httpx.Client, video: str, whole: bytes) -> None:
    head = api.head(video)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(whole))
    assert head.headers["content-type"] == "video/mp4"
    assert head.headers["accept-ranges"] == "bytes"
    assert head.headers["cache-control"] == "private"
    assert head.headers["content-disposition"].startswith('attachment; filename="video_')


def test_each_output_has_its_variant_and_seed(api: httpx.Client, video: str, whole: bytes) -> None:
    assert api.get(video + "?variant=0").content == whole
    assert api.get(video + "?variant=video").content == whole
    second = api.get(video + "?variant=1").content
    assert second[4:8] == b"ftyp"
    assert second != whole
    for bad in ("2", "-1", "x", "00", "thumb", "../0"):
        answer = api.get(video, params={"variant": bad})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")


def test_a_video_that_is_not_ready_says_so(served: Serving, api: httpx.Client) -> None:
    job = api.post("/v1/videos", json={"prompt": "slow=0.2"}).json()
    answer = api.get(f"/v1/videos/{job['id']}/content")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "video_not_ready")
    api.delete(f"/v1/videos/{job['id']}")


def test_a_download_under_way_ends_although_the_video_is_deleted(served: Serving) -> None:
    with served.client as client:
        fields = {"prompt": "noise", "size": "256x256", "num_frames": 97, "output_compression": 0}
        job = client.post("/v1/videos", json=fields).json()
        served.until(job["id"], "completed")
        path = f"/v1/videos/{job['id']}/content"
        size = int(client.head(path).headers["content-length"])
        assert size > 10 << 20, "too small: it may all be in the sockets' buffers"
        with client.stream("GET", path) as answer:
            chunks = answer.iter_raw(1024)
            got = len(next(chunks))
            assert client.delete(f"/v1/videos/{job['id']}").json()["deleted"] is True
            got += sum(len(chunk) for chunk in chunks)
        assert got == size
        assert client.get(path).status_code == 404
