"""Who may do what: keys, shares, other sites' pages, addresses that must not be fetched, logs without prompts."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from tests.server.serving import Serving

from diptych.server.api import fetch
from diptych.server.problems import Problem
from diptych.server.settings import SettingsError, load

server = pytest.mark.server
ALICE, BOB, ADMIN = "alice-secret", "bob-secret-1", "admin-secret"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture(scope="module")
def keyed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    folder = tmp_path_factory.mktemp("keyed")
    (folder / "keys").write_text(f"# comment\nbob={BOB}\n")
    flags = ("--api-key", f"alice={ALICE}", "--api-key-file", str(folder / "keys"), "--admin-key", ADMIN)
    with Serving(
        folder / "state", *flags, "--max-queue-per-key", "2", "--max-streams-per-key", "1", "--log-json"
    ) as serving:
        yield serving


@server
@pytest.mark.parametrize(
    "header", [{}, bearer("wrong-secret"), {"Authorization": "Bearer"}, {"Authorization": ALICE}, bearer(ALICE + "x")]
)
@pytest.mark.parametrize("path", ["/v1/videos", "/v1/models", "/v1/videos/video_x/content"])
def test_all_of_v1_needs_a_key(keyed: Serving, header: dict[str, str], path: str) -> None:
    with keyed.client as client:
        answer = client.get(path, headers=header)
    assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")


@server
def test_health_and_the_page_need_none(keyed: Serving) -> None:
    with keyed.client as client:
        assert [client.get(p).status_code for p in ("/livez", "/readyz", "/metrics", "/")] == [200] * 4


@server
def test_a_key_sees_its_own_jobs_only_and_the_admin_all(keyed: Serving) -> None:
    with keyed.client as client:
        job = client.post("/v1/videos", json={"prompt": "mine"}, headers=bearer(ALICE)).json()
        path = f"/v1/videos/{job['id']}"
        for method, tail in (("GET", ""), ("GET", "/content"), ("GET", "/events"), ("POST", "/cancel"), ("DELETE", "")):
            assert client.request(method, path + tail, headers=bearer(BOB)).status_code == 404
        assert client.post(path + "/remix", json={"prompt": "x"}, headers=bearer(BOB)).status_code == 404
        assert job["id"] not in [v["id"] for v in client.get("/v1/videos", headers=bearer(BOB)).json()["data"]]
        assert client.get(path, headers=bearer(ALICE)).status_code == 200
        assert client.get(path, headers=bearer(ADMIN)).status_code == 200
        assert job["id"] in [v["id"] for v in client.get("/v1/videos", headers=bearer(ADMIN)).json()["data"]]


@server
def test_one_key_cannot_take_the_queue_or_starve_the_other(keyed: Serving) -> None:
    with keyed.client as client:

        def post(key: str, prompt: str, steps: int = 1) -> httpx.Response:
            fields = {"prompt": prompt, "num_inference_steps": steps}
            return client.post("/v1/videos", json=fields, headers=bearer(key))

        running = post(ALICE, "slow=0.1", 100).json()["id"]
        while client.get(f"/v1/videos/{running}", headers=bearer(ALICE)).json()["status"] != "in_progress":
            time.sleep(0.02)
        alice = [post(ALICE, f"a{i}").json()["id"] for i in range(2)]
        refused = post(ALICE, "a3")
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "key_limit")
        bob = post(BOB, "b").json()["id"]
        client.delete(f"/v1/videos/{running}", headers=bearer(ALICE))
        ended = {}
        while len(ended) < 3:
            for video in (*alice, bob):
                job = client.get(f"/v1/videos/{video}", headers=bearer(ADMIN)).json()
                if job["status"] == "completed":
                    ended.setdefault(video, len(ended))
            time.sleep(0.02)
        assert ended[bob] < ended[alice[1]], "bob came third, but his turn was before alice's second job"


@server
def test_one_key_cannot_hold_all_event_streams(keyed: Serving) -> None:
    with keyed.client as client, keyed.client as other:
        video = client.post("/v1/videos", json={"prompt": "slow=0.5"}, headers=bearer(ALICE)).json()["id"]
        with client.stream("GET", f"/v1/videos/{video}/events", headers=bearer(ALICE)) as first:
            lines = first.iter_lines()
            next(lines)
            second = other.get(f"/v1/videos/{video}/events", headers=bearer(ALICE))
            assert (second.status_code, second.json()["error"]["code"]) == (429, "key_limit")
        client.delete(f"/v1/videos/{video}", headers=bearer(ALICE))


@server
def test_logs_name_the_request_and_keep_the_prompt_out(keyed: Serving) -> None:
    with keyed.client as client:
        headers = bearer(ALICE) | {"X-Request-Id": "my-request-7"}
        answer = client.post("/v1/videos", json={"prompt": "a very private wish"}, headers=headers)
        assert answer.headers["x-request-id"] == "my-request-7"
    lines = [line for line in keyed.log.read_text().splitlines() if line.startswith("{")]
    assert any(json.loads(line)["request_id"] == "my-request-7" for line in lines)
    assert "private wish" not in keyed.log.read_text()
    assert ALICE not in keyed.log.read_text()


@server
def test_prompts_are_logged_when_asked_for(tmp_path: Path) -> None:
    with Serving(tmp_path / "state", "--log-prompts") as serving:
        with serving.client as client:
            client.post("/v1/videos", json={"prompt": "a very private wish"})
        assert "a very private wish" in serving.log.read_text()


@server
def test_pages_of_other_sites_can_do_nothing(api: httpx.Client) -> None:
    for site in ("cross-site", "same-site"):
        answer = api.post("/v1/videos", json={"prompt": "x"}, headers={"Sec-Fetch-Site": site})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed")
    rebound = api.get("/v1/videos", headers={"Host": "evil.example"})
    assert (rebound.status_code, rebound.json()["error"]["code"]) == (403, "host_not_allowed")
    assert (
        "access-control-allow-origin" not in api.get("/v1/videos", headers={"Origin": "https://evil.example"}).headers
    )


@server
def test_every_answer_has_the_headers_that_confine_a_page(api: httpx.Client) -> None:
    for path in ("/", "/v1/videos", "/nothing"):
        headers = api.get(path).headers
        assert headers["content-security-policy"].startswith("default-src 'none'; script-src 'self'")
        assert "unsafe" not in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"


def test_other_addresses_need_a_key_or_an_explicit_word() -> None:
    with pytest.raises(SettingsError, match=r"0\.0\.0\.0 is reached by others"):
        load(["x", "--host", "0.0.0.0"])
    assert load(["x", "--host", "0.0.0.0", "--insecure"]).host == "0.0.0.0"
    assert load(["x", "--host", "0.0.0.0", "--api-key", ALICE]).host == "0.0.0.0"
    assert load(["x", "--host", "::1"]).host == "::1"


@pytest.mark.parametrize(
    ("flag", "told"), [("--data-dir=x", "unrecognized arguments: --data-dir=x"), ("--port", "expected one argument")]
)
def test_a_flag_that_does_not_exist_is_refused_in_one_sentence(
    capfd: pytest.CaptureFixture[str], flag: str, told: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        load(["x", flag])
    assert told in str(refused.value) and str(refused.value).endswith("; diptych serve --help tells what there is.")
    assert capfd.readouterr().err == "", "no list of every flag above it"


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "10.0.0.1", "192.168.1.1", "169.254.169.254", "::1", "fe80::1", "0.0.0.0", "::ffff:10.0.0.1"],
)
def test_an_allowed_host_with_a_private_address_is_not_fetched(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    found = [(family, socket.SOCK_STREAM, 6, "", (address, 443)), (socket.AF_INET, 1, 6, "", ("93.184.216.34", 443))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(Problem, match="not public") as refused:
        fetch.fetch("https://pictures.example/a.png", frozenset({"pictures.example"}), 1000)
    assert refused.value.code == "url_not_allowed"


@pytest.mark.parametrize(
    "url",
    [
        "http://pictures.example/a",
        "https://other.example/a",
        "https://u@pictures.example/a",
        "https://pictures.example:8443/a",
    ],
)
def test_only_plain_https_of_listed_hosts_is_fetched(url: str) -> None:
    with pytest.raises(Problem, match="not on the list"):
        fetch.fetch(url, frozenset({"pictures.example"}), 1000)


def test_a_redirect_off_the_list_is_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Redirecting:
        def __init__(self, *_: object) -> None:
            self.status = 302
            self.headers = {"Location": "https://169.254.169.254/latest"}

        def request(self, *_: object, **__: object) -> None: ...
        def close(self) -> None: ...
        def getresponse(self) -> Redirecting:
            return self

    monkeypatch.setattr(fetch, "_Pinned", Redirecting)
    monkeypatch.setattr(fetch, "public_address", lambda host: "93.184.216.34")
    with pytest.raises(Problem, match="not on the list"):
        fetch.fetch("https://pictures.example/a.png", frozenset({"pictures.example"}), 1000)


def test_a_key_file_can_hold_the_keys(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("ann:3=ann-secret-1\nplain-secret\n")
    keys = load(["x", "--api-key-file", str(tmp_path / "keys")]).keys()
    assert [(k.name, k.priority) for k in keys] == [("ann", 3), ("key2", 0)]
