"""Checkpoints from a hub: a server that speaks its protocol stands in for it, on this machine."""

from __future__ import annotations

import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

from diptych.errors import CheckpointError
from diptych.model.checkpoint import Checkpoint

COMMIT = "5686616f04318cbec7b0a4978b4ff1697395de15"
LITE = "kandinskylab/Kandinsky-6.0-Lite-distill-5s-Diffusers"
GATED = "kandinskylab/Kandinsky-6.0-Pro-5s-Diffusers"


class Hub(ThreadingHTTPServer):
    """Serves the files of `root` as the repositories LITE and, to holders of the token `hf_good`, GATED."""

    daemon_threads = True

    def __init__(self, root: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.root = root
        self.files = sorted(f.relative_to(root).as_posix() for f in root.rglob("*") if f.is_file())
        self.sent: dict[str, int] = {}
        self.failing = False


class Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = unquote(urlsplit(self.path).path)
        found = re.fullmatch(r"(?:/api/models)?/([\w.-]+/[\w.-]+)/(revision|tree|resolve)/([^/]+)(?:/(.*))?", path)
        if not found or found[1] not in (LITE, GATED):
            return self.refuse(404, "RepoNotFound")
        repo, what, revision, file = found.groups()
        if revision not in ("main", COMMIT):
            return self.refuse(404, "RevisionNotFound")
        if what == "revision":
            return self.send_json({"id": repo, "sha": COMMIT, "siblings": []})
        if what == "tree":
            entries = [
                {"type": "file", "path": f, "size": (self.server.root / f).stat().st_size, "oid": "0" * 40}
                for f in self.server.files
            ]
            return self.send_json(entries)
        if self.server.failing:
            return self.refuse(507, "")
        if repo == GATED and self.headers.get("authorization") != "Bearer hf_good":
            return self.refuse(401, "GatedRepo")
        return self.send_file(file)

    def refuse(self, status: int, code: str) -> None:
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def send_json(self, values: object) -> None:
        body = json.dumps(values).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def send_file(self, file: str) -> None:
        data = (self.server.root / file).read_bytes()
        etag = hashlib.sha256(data).hexdigest()
        first, last = 0, len(data) - 1
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("range") or "")
        if asked:
            first, last = int(asked[1]), min(int(asked[2] or last), last)
        body = data[first : last + 1]
        self.send_response(206 if asked else 200)
        self.send_header("ETag", f'"{etag}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(len(body)))
        if asked:
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(data)}")
        self.end_headers()
        if self.command == "GET":
            self.server.sent[file] = self.server.sent.get(file, 0) + len(body)
            self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def hub(tiny_distilled, tmp_path, monkeypatch):
    server = Hub(tiny_distilled)
    Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", endpoint + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    yield server
    server.shutdown()
    server.server_close()


def test_a_catalogue_name_is_downloaded_and_then_found_without_the_hub(hub, tiny_distilled, monkeypatch):
    told = []
    checkpoint = Checkpoint.open("lite-distill", on_bytes=lambda done, total: told.append((done, total)))
    assert checkpoint.local and checkpoint.revision == COMMIT and checkpoint.name == "lite-distill"
    assert checkpoint.fingerprint == Checkpoint.open(tiny_distilled).fingerprint
    assert told[-1][0] == told[-1][1] == sum((tiny_distilled / f).stat().st_size for f in hub.files)
    sent = dict(hub.sent)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    again = Checkpoint.open(LITE)
    assert again.root == checkpoint.root and hub.sent == sent


def test_looking_at_one_fetches_headers_only(hub, tiny_distilled):
    seen, local = Checkpoint.open(LITE, weights=False), Checkpoint.open(tiny_distilled)
    weights = {name: sent for name, sent in hub.sent.items() if name.endswith(".safetensors")}
    assert len(weights) == 6 and all(sent <= 100_001 + 100_000 for sent in weights.values())
    assert not seen.local and seen.fingerprint is None
    for name, part in local.components.items():
        assert (seen[name].parameters, seen[name].nbytes, seen[name].dtypes) == (
            *(part.parameters, part.nbytes, part.dtypes),
        )
    assert seen.defaults == local.defaults


def test_a_gated_repository_needs_a_token(hub, monkeypatch):
    with pytest.raises(CheckpointError, match=r"^\S+Pro-5s-Diffusers is gated: accept its terms at .* set HF_TOKEN"):
        Checkpoint.open("pro")
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert Checkpoint.open("pro").distilled


def test_what_is_not_there(hub):
    with pytest.raises(CheckpointError, match=r"^no/such is not on the hub, or is private and HF_TOKEN does not"):
        Checkpoint.open("no/such")
    with pytest.raises(CheckpointError, match=rf"^{LITE} has no revision v9$"):
        Checkpoint.open(LITE, revision="v9")
    with pytest.raises(CheckpointError, match=r"^a--b/c is not a name a hub repository can have$"):
        Checkpoint.open("a--b/c")


@pytest.mark.parametrize("weights", [True, False])
def test_offline_and_not_in_the_cache(hub, monkeypatch, weights):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match=r"is not complete in the local cache, and HF_HUB_OFFLINE forbids"):
        Checkpoint.open("lite-distill", weights=weights)


def test_an_unreachable_hub(hub, monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=r"is not complete in the local cache, and the hub cannot be reached$"):
        Checkpoint.open("lite-distill")


def test_an_incomplete_cache_is_refused_offline(hub, monkeypatch):
    root = Checkpoint.open(LITE).root
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (root / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=rf"^{LITE} is not complete in the local cache, and HF_HUB_OFFLINE"):
        Checkpoint.open(LITE)


def test_a_failing_hub(hub):
    hub.failing = True
    with pytest.raises(CheckpointError, match=r"local cache, and the hub answers with status 507$"):
        Checkpoint.open(LITE)
