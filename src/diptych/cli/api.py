"""One running server, as `diptych client` talks to it: whatever goes wrong on the way is one sentence."""

from __future__ import annotations

import json
import os
import socket
import ssl
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from typing import Any, cast
from urllib.parse import urlsplit

from diptych.errors import RequestError, UserError

LOCAL = "http://127.0.0.1:8000"
TIMEOUT = 60
"""Seconds without a byte after which a server is given up; one that is alive tells something every 15."""
ENDS = ("completed", "failed", "deleted")


class RefusedError(UserError):
    """What the server answered when it could not do what was asked, or why it could not be asked."""


class Api:
    """The server at `url`. The key comes from DIPTYCH_API_KEY. Raises `RequestError` for what is no address."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self.key = os.environ.get("DIPTYCH_API_KEY", "")
        if not _is_address(self.url):
            raise RequestError("--url", url, f"an address such as {LOCAL}")
        if not (self.key.isascii() and self.key.isprintable()):
            raise RefusedError("DIPTYCH_API_KEY is not accepted: a key holds plain letters, digits and signs alone.")

    @contextmanager
    def open(self, method: str, path: str, body: dict[str, Any] | None = None) -> Iterator[HTTPResponse]:
        """The answer, to be read in the block. Raises `RefusedError`: the server's own sentence, or what is between."""
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        heard = False
        try:
            with cast(HTTPResponse, urllib.request.urlopen(request, timeout=TIMEOUT)) as answer:
                heard = True
                yield answer
        except urllib.error.HTTPError as error:
            raise RefusedError(_sentence(error) or self._no_server(f"what does answers {error.code}")) from None
        except (OSError, HTTPException) as error:
            if heard:
                raise RefusedError(f"the connection to {self.url} broke off: {_why(error)}.") from None
            raise RefusedError(self._no_server(_why(error))) from None

    def json(self, method: str, path: str, wanted: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """What is answered, an object that has a member `wanted`."""
        with self.open(method, path, body) as answer:
            data = answer.read()
        return self._object(data, wanted)

    def read(self, path: str) -> bytes:
        with self.open("GET", path) as answer:
            return answer.read()

    def events(self, video_id: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Name and data of each, to the end of the video. Raises `RefusedError` where the server stops before."""
        name = ""
        with self.open("GET", f"/v1/videos/{video_id}/events") as answer:
            for raw in answer:
                line = raw.decode(errors="replace").rstrip("\r\n")
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    yield name, self._object(line[6:], "id")
        if name not in ENDS:
            again = f"diptych client watch {video_id} follows it once the server is back"
            raise RefusedError(f"the server at {self.url} stopped before the clip was done; {again}.")

    def _object(self, text: bytes | str, wanted: str) -> dict[str, Any]:
        try:
            found = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or wanted not in found:
            raise RefusedError(self._no_server("what does sends something else"))
        return found

    def _no_server(self, why: str) -> str:
        return f"no Diptych server answers at {self.url}: {why}."


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number or cannot be one
        return False
    return known and url.isascii() and url.isprintable() and " " not in url and not (parts.query or parts.fragment)


def _why(error: Exception) -> str:
    """What kept a server from answering, and what to do about it."""
    reason = getattr(error, "reason", error)
    if isinstance(reason, ConnectionRefusedError):
        return "nothing listens there; `diptych serve` starts a server, --url names another"
    if isinstance(reason, socket.gaierror):
        return "no host of that name is known; --url names another"
    if isinstance(reason, TimeoutError):
        return f"nothing came within {TIMEOUT} seconds"
    if isinstance(reason, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted ({reason.verify_message})"
    if isinstance(reason, ssl.SSLError):
        return "it does not speak HTTPS, as the address says; try http://"
    if isinstance(reason, ConnectionError):
        return "the connection was closed"
    if isinstance(reason, HTTPException):
        return "what listens there does not speak HTTP, or not to its end"
    return (getattr(reason, "strerror", None) or str(reason)).lower()


def _sentence(error: urllib.error.HTTPError) -> str | None:
    """The server's own, if it is one of ours."""
    try:
        return str(json.load(error)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError, OSError, HTTPException):
        return None
