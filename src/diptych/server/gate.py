"""What every request passes first: its id, its size, who sends it and from where; and the net for our own faults."""

from __future__ import annotations

import contextvars
import json
import logging
import re
import time
import uuid
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from diptych.server.problems import Problem
from diptych.server.service import Caller, Service

log = logging.getLogger("diptych.server.access")

request_id: contextvars.ContextVar[str] = contextvars.ContextVar("request_id", default="-")
_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_LOCAL = {"localhost", "127.0.0.1", "[::1]", "::1", "testserver"}
PAGE_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; media-src 'self' blob:; "
    "connect-src 'self'; font-src 'self'; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)


class Gate:
    """Pure ASGI: it must not buffer streams."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app, self.service = app, service
        self.limit = service.settings.max_body_mib << 20
        self.local_only = not service.keys and not service.settings.insecure
        self.hosts = _LOCAL | set(service.settings.allowed_host) | {service.settings.host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id.set(given if _ID.fullmatch(given) else uuid.uuid4().hex)
        started, status, began = time.monotonic(), 500, False

        async def answer(message: Message) -> None:
            nonlocal status, began
            if message["type"] == "http.response.start":
                status, began = message["status"], True
                self._dress(scope, MutableHeaders(raw=message["headers"]))
            await send(message)

        try:
            self._check(scope, headers)
            await self.app(scope, self._counted(receive), answer)
        except Problem as problem:
            if began:
                raise
            await _send(problem, answer)
        except Exception:
            log.exception("fault of ours in %s %s", scope["method"], scope["path"])
            if began:
                raise
            await _send(Problem(500, "internal_error", "The server made a mistake; its log tells more."), answer)
        finally:
            self.service.metrics.answers.labels(str(status)).inc()
            seconds = time.monotonic() - started
            # Polling is no news.
            quiet = scope["method"] in ("GET", "HEAD") and status in (200, 206, 304, 503)
            level = logging.DEBUG if quiet else logging.INFO
            log.log(level, "%s %s %d %.3f s", scope["method"], scope["path"], status, seconds)

    def _check(self, scope: Scope, headers: Headers) -> None:
        """Raises `Problem` before any of the body is read."""
        host = (
            headers.get("host", "").rsplit(":", 1)[0] if not headers.get("host", "").endswith("]") else headers["host"]
        )
        if self.local_only and host not in self.hosts:
            # A page that rebinds its own name to 127.0.0.1 must not reach a server without keys.
            raise Problem(403, "host_not_allowed", f"The host {host[:80]!r} is not served; see --allowed-host.")
        if scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
                raise Problem(403, "origin_not_allowed", "Pages of other sites may not send requests here.")
            length = headers.get("content-length", "0")
            if not length.isdigit() or int(length) > self.limit:
                raise self._too_large()
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        scope["caller"] = Caller()
        if path.startswith("/v1"):
            caller = self.service.caller(headers.get("authorization", ""))
            if caller is None:
                text = "The API key is missing or wrong: send Authorization: Bearer KEY."
                raise Problem(401, "invalid_api_key", text, headers={"WWW-Authenticate": "Bearer"})
            scope["caller"] = caller

    def _counted(self, receive: Receive) -> Receive:
        seen = 0

        async def counted() -> Message:
            nonlocal seen
            message = await receive()
            seen += len(message.get("body", b""))
            if seen > self.limit:
                raise self._too_large()
            return message

        return counted

    def _too_large(self) -> Problem:
        limit = self.service.settings.max_body_mib
        return Problem(
            413, "request_too_large", f"The request is larger than {limit} MiB.", headers={"Connection": "close"}
        )

    def _dress(self, scope: Scope, headers: MutableHeaders) -> None:
        headers["X-Request-Id"] = request_id.get()
        headers["X-Content-Type-Options"] = "nosniff"
        headers["Referrer-Policy"] = "no-referrer"
        headers["Cross-Origin-Resource-Policy"] = "same-origin"
        headers.setdefault("Content-Security-Policy", PAGE_POLICY)


async def _send(problem: Problem, send: Send) -> None:
    body = json.dumps(problem.body()).encode()
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **problem.headers}
    raw: list[Any] = [(k.lower().encode(), v.encode("latin-1", "replace")) for k, v in headers.items()]
    await send({"type": "http.response.start", "status": problem.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
