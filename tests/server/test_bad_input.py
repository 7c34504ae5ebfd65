"""Bad requests get one clear sentence, and the next good request works as if they had never come."""

from __future__ import annotations

import io
import socket
from typing import Any

import httpx2 as httpx
import pytest
from PIL import Image
from tests.server.bad_requests import PROMPT, ROWS, Row
from tests.server.serving import Serving

pytestmark = pytest.mark.server


def folders(served: Serving) -> set[str]:
    return {folder.name for folder in (served.state / "jobs").iterdir()}


def test_the_table_is_long_enough() -> None:
    assert len({name for name, *_ in ROWS}) == len(ROWS) >= 60


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_bad_request_is_refused_with_its_sentence(api: httpx.Client, row: Row) -> None:
    _, request, status, code, message = row
    answer = api.post("/v1/videos", **request)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["message"]) == (status, code, message)
    assert set(error) == {"message", "type", "param", "code"}
    assert answer.headers["x-request-id"]


def test_after_all_of_them_the_next_good_request_works_and_nothing_is_left(served: Serving, api: httpx.Client) -> None:
    before = folders(served)
    for _, request, *_ in ROWS:
        api.post("/v1/videos", **request)
    assert folders(served) == before
    job = api.post("/v1/videos", json=PROMPT).json()
    assert served.until(job["id"], "completed")["progress"] == 100
    assert "Traceback" not in served.log.read_text()


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/videos/video_x", 404, "video_not_found"),
        ("GET", "/v1/videos/" + "video_" + "0" * 32, 404, "video_not_found"),
        ("GET", "/v1/videos/..%2f..%2fetc%2fpasswd", 404, "not_found"),
        ("GET", "/v1/videos/video_x/content", 404, "video_not_found"),
        ("GET", "/v1/videos/video_x/events", 404, "video_not_found"),
        ("DELETE", "/v1/videos/video_x", 404, "video_not_found"),
        ("POST", "/v1/videos/video_x/cancel", 404, "video_not_found"),
        ("GET", "/v1/videos?limit=101", 400, "invalid_value"),
        ("GET", "/v1/videos?limit=-1", 400, "invalid_value"),
        ("GET", "/v1/videos?limit=x", 400, "invalid_value"),
        ("GET", "/v1/videos?order=up", 400, "invalid_value"),
        ("GET", "/v1/videos?status=odd", 400, "invalid_value"),
        ("GET", "/v1/videos?after=x", 400, "invalid_cursor"),
        ("GET", "/v1/videos?page=2", 400, "unknown_parameter"),
        ("GET", "/v1/models/other", 404, "model_not_found"),
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/studio/..%2fapp.py", 404, "not_found"),
        ("GET", "/studio/app.py", 404, "not_found"),
        ("PUT", "/v1/videos", 405, "method_not_allowed"),
        ("PATCH", "/v1/videos/video_x", 405, "method_not_allowed"),
    ],
)
def test_other_routes_refuse_in_the_same_shape(
    api: httpx.Client, method: str, path: str, status: int, code: str
) -> None:
    answer = api.request(method, path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("field", "good", "bad"),
    [
        ("num_frames", [5, 509], [4, 510]),
        ("fps", [1, 60], [0.99, 60.01]),
        ("num_inference_steps", [1, 200], [0, 201]),
        ("guidance_scale", [0, 20], [-0.01, 20.01]),
        ("width", [64, 2048], [48, 2064]),
        ("n", [1, 4], [0, 5]),
        ("max_sequence_length", [1, 1024], [0, 1025]),
        ("output_compression", [0, 100], [-1, 101]),
        ("seed", [0, 2**63 - 1], [-1, 2**63]),
        ("prompt", ["a", "a" * 32_000], ["", "a" * 32_001]),
        ("user", ["", "u" * 256], ["u" * 257]),
    ],
)
def test_each_limit_at_and_beyond_it(api: httpx.Client, field: str, good: list[Any], bad: list[Any]) -> None:
    base: dict[str, Any] = PROMPT | {"num_frames": 5}
    if field == "width":
        base["height"] = 64
    if field == "fps":
        base["num_frames"] = 9
    if field == "num_frames":
        base["fps"] = 60
    for value in good:
        answer = api.post("/v1/videos", json=base | {field: value})
        assert answer.status_code == 200, answer.text
        api.delete("/v1/videos/" + answer.json()["id"])
    for value in bad:
        answer = api.post("/v1/videos", json=base | {field: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


def test_a_24_megapixel_photo_works(api: httpx.Client) -> None:
    photo = io.BytesIO()
    Image.linear_gradient("L").resize((6000, 4000)).convert("RGB").save(photo, "JPEG", quality=90)
    answer = api.post("/v1/videos", data=PROMPT, files={"input_reference": ("photo.jpg", photo.getvalue())})
    assert answer.status_code == 200
    assert answer.json()["size"] == "96x64"
    api.delete("/v1/videos/" + answer.json()["id"])


def test_a_client_that_hangs_up_during_upload_leaves_nothing(served: Serving, api: httpx.Client) -> None:
    before = folders(served)
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(
            b"POST /v1/videos HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 1000000\r\n"
            b"Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\n"
            b'Content-Disposition: form-data; name="prompt"\r\n\r\na lamp'
        )
    assert api.get("/livez").status_code == 200
    assert folders(served) == before
    assert api.post("/v1/videos", json=PROMPT).status_code == 200
    assert "Traceback" not in served.log.read_text()


def test_a_declared_length_over_the_limit_is_refused_before_the_body_is_read(served: Serving) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        raw.sendall(
            b"POST /v1/videos HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n"
            b"Content-Type: application/json\r\n\r\n"
        )
        assert raw.recv(4096).startswith(b"HTTP/1.1 413")


def test_an_undeclared_body_is_cut_off_at_the_limit(api: httpx.Client) -> None:
    sent = []

    def endless() -> Any:
        while len(sent) < 256:
            sent.append(1)
            yield b"x" * (1 << 20)

    answer = api.post("/v1/videos", content=endless(), headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")
    assert 64 <= len(sent) < 128


def test_no_request_drawn_from_the_schema_makes_the_server_fail(served: Serving) -> None:
    import schemathesis
    from hypothesis import HealthCheck, Phase, given, settings

    schema = schemathesis.openapi.from_url(served.url + "/openapi.json")
    chosen = schema.include(path_regex=r"^/v1/videos(/\{video_id\}(/(remix|content|cancel))?|/edits)?$")
    often = settings(
        max_examples=15,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        derandomize=True,
    )
    operations = [found.ok() for found in chosen.get_all_operations()]
    assert len(operations) >= 8
    for operation in operations:

        @often
        @given(case=operation.as_strategy())
        def probe(case: Any) -> None:
            answer = case.call()
            assert answer.status_code < 500, answer.text

        probe()
    with served.client as client:
        for job in client.get("/v1/videos?limit=100").json()["data"]:
            client.delete("/v1/videos/" + job["id"])
    assert "fault of ours" not in served.log.read_text()
