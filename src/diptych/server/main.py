"""`diptych serve`: one process for HTTP and the queue, one for each engine."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import threading
from types import FrameType

import uvicorn

from diptych.server.app import build
from diptych.server.logs import configure
from diptych.server.running.process import ENGINE
from diptych.server.service import Service
from diptych.server.settings import Settings, SettingsError

log = logging.getLogger(__name__)


class Server(uvicorn.Server):
    """On the first signal answers go on while running jobs end; on the second one everything ends."""

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self.service = service

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.service.draining:
            super().handle_exit(sig, frame)
            return
        log.info("stopping: running jobs have %.0f s", self.service.settings.drain_timeout)
        threading.Thread(target=self._drain, name="drain", daemon=True).start()

    def _drain(self) -> None:
        try:
            self.service.drain()
        finally:
            self.service.hub.close()
            self.should_exit = True


def serve(settings: Settings, engine: str = ENGINE) -> None:
    """Serve until a signal ends it. Raises `SettingsError` when the address cannot be had."""
    if not settings.checkpoint:
        raise SettingsError("checkpoint is missing: diptych serve CHECKPOINT, a folder or a hub id")
    configure(settings)
    listener = _bind(settings)
    service = Service(settings, engine)
    config = uvicorn.Config(
        build(service),
        log_config=None,
        access_log=False,
        proxy_headers=True,
        forwarded_allow_ips=settings.forwarded_allow_ips,
        server_header=False,
        timeout_graceful_shutdown=5,
        backlog=4096,
    )
    host, port = listener.getsockname()[:2]
    print(f"diptych: http://{host}:{port}{settings.root_path}/", file=sys.stderr, flush=True)
    with contextlib.suppress(KeyboardInterrupt, asyncio.CancelledError):
        Server(config, service).run(sockets=[listener])


def _bind(settings: Settings) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(settings.host, settings.port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(4096)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise SettingsError(f"--host {settings.host} --port {settings.port}: {reason}") from None
    return listener
