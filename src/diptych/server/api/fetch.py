"""Fetching an allow-listed image: https only, addresses checked after DNS, redirects held to the same list."""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import socket
import ssl
import time
from urllib.parse import urljoin, urlsplit

from diptych.server.problems import Problem

REDIRECTS = 3
SECONDS = 10.0


def fetch(url: str, allowed: frozenset[str], limit: int) -> bytes:
    """At most `limit` + 1 bytes of `url`. Raises `Problem` 400 for what may not, or cannot, be fetched."""
    deadline = time.monotonic() + SECONDS
    for _ in range(REDIRECTS + 1):
        parts = urlsplit(url)
        if parts.scheme != "https" or parts.hostname not in allowed or parts.username or parts.port not in (None, 443):
            raise _refused("The address, or one it leads to, is not on the list of this server.")
        address = public_address(parts.hostname)
        path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        try:
            with contextlib.closing(_Pinned(parts.hostname, address, deadline - time.monotonic())) as connection:
                connection.request("GET", path, headers={"Accept": "image/*", "User-Agent": "diptych"})
                answer = connection.getresponse()
                if answer.status in (301, 302, 303, 307, 308):
                    url = urljoin(url, answer.headers.get("Location", ""))
                    continue
                if answer.status != 200:
                    raise _refused(f"The image could not be fetched: its server answered {answer.status}.")
                return _read(answer, limit, deadline)
        except (OSError, http.client.HTTPException, ValueError):
            raise _refused("The image could not be fetched.") from None
    raise _refused(f"The image could not be fetched: more than {REDIRECTS} redirects.")


def public_address(host: str) -> str:
    """One public address of `host`; all of them must be public. Raises `Problem`."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, 443, type=socket.SOCK_STREAM)}
    except OSError:
        raise _refused("The host of the image is unknown.") from None
    if not found or not all(ipaddress.ip_address(a.split("%")[0]).is_global for a in found):
        raise _refused("The host of the image has an address that is not public.")
    return sorted(found)[0]


class _Pinned(http.client.HTTPSConnection):
    """TLS to an address that was checked, under the name that was asked for: DNS is not asked twice."""

    def __init__(self, host: str, address: str, timeout: float) -> None:
        self._tls = ssl.create_default_context()
        super().__init__(host, timeout=max(timeout, 0.1), context=self._tls)
        self._address = address

    def connect(self) -> None:
        raw = socket.create_connection((self._address, 443), self.timeout)
        self.sock = self._tls.wrap_socket(raw, server_hostname=self.host)


def _read(answer: http.client.HTTPResponse, limit: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) <= limit:
        if time.monotonic() > deadline:
            raise _refused(f"The image could not be fetched within {SECONDS:.0f} s.")
        chunk = answer.read1(1 << 16)
        if not chunk:
            break
        data += chunk
    return bytes(data[: limit + 1])


def _refused(message: str) -> Problem:
    return Problem(400, "url_not_allowed", message, "input_reference")
