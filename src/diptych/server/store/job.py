"""One job as the store holds it, and the words for its states."""

from __future__ import annotations

import json
import os
import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Status = Literal["queued", "in_progress", "completed", "failed"]
Stop = Literal["cancel", "delete"]
Clock = Callable[[], int]

TERMINAL = ("completed", "failed")


def wall_ms() -> int:
    return time.time_ns() // 1_000_000


def new_id(now_ms: int) -> str:
    """`video_` and 32 hex digits, the first 12 of them the creation time in ms: an id alone is a sort key."""
    return f"video_{now_ms & (1 << 48) - 1:012x}{secrets.token_hex(10)}"


def is_id(text: str) -> bool:
    digits = text.removeprefix("video_")
    return text.startswith("video_") and len(digits) == 32 and set(digits) <= set("0123456789abcdef")


@dataclass(frozen=True)
class Job:
    """A row of the jobs table, decoded. Times are unix milliseconds; spec, outcome and error are JSON objects."""

    seq: int
    id: str
    key: str
    priority: int
    status: Status
    cancel: Stop | Literal[""]
    created_ms: int
    started_ms: int | None
    completed_ms: int | None
    expires_ms: int | None
    spec: dict[str, Any]
    outcome: dict[str, Any] | None
    error: dict[str, Any] | None
    remixed_from: str | None
    runner: str | None
    attempt: int
    beat: int
    turn: int
    version: int
    progress: int
    stage: str | None
    step: int | None
    total_steps: int | None
    eta_ms: int | None
    preview: int
    bytes: int

    @property
    def terminal(self) -> bool:
        return self.status in TERMINAL

    @classmethod
    def from_row(cls, row: Any) -> Job:
        values = dict(row._mapping)
        for name in ("spec", "outcome", "error"):
            values[name] = None if values[name] is None else json.loads(values[name])
        if not isinstance(values["spec"], dict):
            raise ValueError("spec is no object")
        return cls(**values)


def error(code: str, message: str, param: str | None = None) -> dict[str, Any]:
    """The `error` of a failed job."""
    kind = "invalid_request_error" if code in ("cancelled", "invalid_value") else "server_error"
    return {"code": code, "message": message, "param": param, "type": kind}


def host_name() -> str:
    """A name of this machine and process namespace: two containers never share one, even under one host name."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    parts = [socket.gethostname()[:60]]
    if boot.exists():
        parts += [boot.read_text().strip()[:8], Path("/proc/self/ns/pid").readlink().name.strip("pid:[]")]
    return "-".join(parts)


def runner_id(index: int) -> str:
    """`host:pid:start:index`: the start time tells a process from a later one of the same number."""
    return f"{host_name()}:{os.getpid()}:{_start_time(os.getpid())}:{index}"


def surely_dead(runner: str) -> bool:
    """Whether the process that a runner id names ran here and is gone; another host's runner may always live."""
    host, pid, start, _ = runner.rsplit(":", 3)
    return host == host_name() and _start_time(int(pid)) != int(start)


def _start_time(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[19])
    except (OSError, IndexError):
        return 0
