"""`diptych serve` and `diptych client` as they are typed."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer
from tests.server.bad_requests import PNG
from tests.server.serving import Serving
from typer.testing import CliRunner, Result

from diptych.cli.client import app
from diptych.cli.serve import CONTEXT, serve
from diptych.errors import UserError


def client(served: Serving, *words: str) -> Result:
    return CliRunner().invoke(app, [*words], env={"DIPTYCH_URL": served.url})


def run_serve(*flags: str) -> Result:
    main = typer.Typer()
    main.command(context_settings=CONTEXT)(serve)
    return CliRunner().invoke(main, [*flags])


@pytest.mark.server
def test_submit_watches_and_downloads(served: Serving, tmp_path: Path) -> None:
    out = tmp_path / "clip.mp4"
    (tmp_path / "a.png").write_bytes(PNG)
    words = ("a lamp", "--size", "64x96", "--steps", "2", "--seed", "5", "--field", "num_frames=13")
    done = client(served, "submit", *words, "--image", str(tmp_path / "a.png"), "--output", str(out))
    assert done.exit_code == 0, done.output
    video = done.stdout.split()[0]
    assert out.read_bytes()[4:8] == b"ftyp"
    with served.client as http:
        job = http.get(f"/v1/videos/{video}").json()
    assert [job[k] for k in ("size", "seed", "num_frames", "task")] == ["64x96", 5, 13, "i2va"]
    assert video in client(served, "list", "--limit", "5").stdout
    picture = tmp_path / "picture.webp"
    assert client(served, "download", video, "--variant", "thumbnail", "--output", str(picture)).exit_code == 0
    assert b"WEBP" in picture.read_bytes()[:16]
    assert client(served, "delete", video).stdout == "deleted\n"


@pytest.mark.server
@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("submit", "a lamp", "--size", "odd"), "size = 'odd' is not accepted"),
        (("submit", "a lamp", "--field", "odd"), "--field = 'odd' is not accepted"),
        (("submit", "a lamp", "--image", "/nowhere.png"), "image /nowhere.png cannot be read"),
        (("submit", "refuse", "--output", "/tmp/never.mp4"), "failed: prompt = 'refuse'"),
        (("watch", "video_x"), "No video has the id"),
        (
            ("list", "--url", "http://127.0.0.1:9"),
            "at http://127.0.0.1:9: nothing listens there; `diptych serve` starts",
        ),
        (("list", "--url", "http://no.such.host.invalid"), "no host of that name is known"),
        (("list", "--url", "file:///etc/passwd"), "an address such as"),
    ],
)
def test_a_refusal_is_one_sentence(served: Serving, words: tuple[str, ...], sentence: str) -> None:
    done = client(served, *words)
    assert sentence in str(done.exception)


@pytest.mark.server
def test_an_address_that_promises_https_is_told(served: Serving) -> None:
    done = client(served, "list", "--url", served.url.replace("http://", "https://"))
    assert "it does not speak HTTPS, as the address says; try http://" in str(done.exception)


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "http://", "http://a b", "http://127.0.0.1:99999", "http://127.0.0.1:port", "http://b\xf6se",
     "http://127.0.0.1:8000/?a=b", "file:///etc/passwd"],
)  # fmt: skip
def test_what_is_no_address_is_refused_before_anything_is_asked(url: str) -> None:
    done = CliRunner().invoke(app, ["list", "--url", url])
    assert str(done.exception) == f"--url = {url!r} is not accepted: an address such as http://127.0.0.1:8000."


def test_a_clip_that_could_not_be_written_is_not_ordered(tmp_path: Path) -> None:
    """Nothing listens at this address: who waits for minutes and then learns of the folder has asked first."""
    for words in (["submit", "a lamp"], ["download", "video_x"]):
        done = CliRunner().invoke(app, [*words, "--output", f"{tmp_path}/no/a.mp4", "--url", "http://127.0.0.1:9"])
        assert str(done.exception).startswith(f"cannot write {tmp_path}/no/a.mp4: there is no folder")


@pytest.mark.parametrize(
    ("words", "answer", "sentence"),
    [
        (["watch", "v"], b"event: snapshot\ndata: {", "what does sends something else."),
        (["watch", "v"], b"", "stopped before the clip was done; diptych client watch v follows it once"),
        (
            ["watch", "v"],
            b'event: progress\ndata: {"id": "v", "status": "queued", "progress": 1}\n\n',
            "stopped before",
        ),
        (["download", "v"], b"half", "broke off: what listens there does not speak HTTP, or not to its end."),
    ],
    ids=["no JSON", "no event", "no end", "half a file"],
)
def test_what_ends_too_early_is_told(words: list[str], answer: bytes, sentence: str, tmp_path: Path) -> None:
    length = b"Content-Length: 99\r\n" if words[0] == "download" else b""
    with answering(b"HTTP/1.1 200 OK\r\n" + length + b"\r\n" + answer) as url:
        more = ["--output", str(tmp_path / "a.mp4")] if words[0] == "download" else []
        done = CliRunner().invoke(app, [*words, *more, "--url", url])
    assert sentence in str(done.exception) and isinstance(done.exception, UserError)
    assert list(tmp_path.iterdir()) == []


def test_a_server_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diptych.cli.api.TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        done = CliRunner().invoke(app, ["list", "--url", url])
    assert str(done.exception) == f"no Diptych server answers at {url}: nothing came within 0.2 seconds."


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The address of a server that says this to the first who asks, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def once() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        threading.Thread(target=once, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (b"SSH-2.0-OpenSSH\r\n", "what listens there does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", "what does sends something else"),
        (b'HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{"no": 1}', "what does sends something else"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n{", "broke off: what listens there does not speak HTTP"),
        (b"HTTP/1.1 404 Not Found\r\nContent-Length: 2\r\n\r\n{}", "what does answers 404."),
        (b"", "the connection was closed"),
    ],
    ids=["SSH", "text", "another server", "half an answer", "a site", "nothing"],
)
def test_what_is_no_server_of_ours_is_told(answer: bytes, sentence: str) -> None:
    with answering(answer) as url:
        done = CliRunner().invoke(app, ["list", "--url", url])
    assert sentence in str(done.exception) and isinstance(done.exception, UserError)


@pytest.mark.server
def test_a_download_is_there_whole_or_not_at_all(served: Serving, tmp_path: Path) -> None:
    video = client(served, "submit", "a lamp", "--output", str(tmp_path / "a.mp4")).stdout.split()[0]
    done = client(served, "download", video, "--output", str(tmp_path / "nowhere" / "b.mp4"))
    assert "cannot write" in str(done.exception) and isinstance(done.exception, UserError)
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]


@pytest.mark.server
def test_cancel_from_the_terminal(served: Serving) -> None:
    video = client(served, "submit", "slow=0.1", "--steps", "100").stdout.strip()
    assert client(served, "cancel", video).stdout.strip() in ("in_progress", "failed")
    assert served.until(video, "failed")["error"]["code"] == "cancelled"
    assert "was cancelled" in str(client(served, "watch", video).exception)


def test_serve_prints_its_settings() -> None:
    done = run_serve("some/model", "--port", "9", "--print-config")
    assert done.exit_code == 0
    assert "checkpoint: some/model\n" in done.stdout
    assert "port: 9\n" in done.stdout


def test_serve_explains_every_setting() -> None:
    from diptych.server.settings import Settings

    done = run_serve("--help")
    assert done.exit_code == 0
    for name in Settings.model_fields:
        assert name == "checkpoint" or "--" + name.replace("_", "-") in done.stdout


def test_importing_the_command_costs_no_server() -> None:
    code = "import sys, diptych.cli.serve, diptych.cli.client; print('fastapi' in sys.modules, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False False\n"


def test_the_server_process_itself_never_imports_torch() -> None:
    code = "import sys, diptych.server.main, diptych.server.running.worker; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
