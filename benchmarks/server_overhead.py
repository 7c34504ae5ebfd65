"""What the server itself costs: creation latency and event delay with an engine that takes no time.

    python benchmarks/server_overhead.py [--clients 50] [--rate 0.5] [--seconds 20] [--json FILE]

A real server process and a real engine process run on this machine, and the clients in one more process. Each client
posts `--rate` times a second on its own schedule (an open loop: a slow answer delays no later post), reads the job
once, and follows it through server-sent events to its end. The delay of an event is from the time of completion that
the store holds (in ms) to the moment the client has read `completed`; only streams that were open before are counted.

Printed: median, p95 and maximum of creation (request sent to answer read), of a plain GET, and of the event delay; then
the creation of `--clients` posts sent in the same instant, which is a throughput, not a latency. Exit status 1 when p95
of creation is not below 50 ms or p95 of the event delay not below 100 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sqlite3
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np

from diptych.media.clip import Clip
from diptych.parallel.layout import Layout
from diptych.request import ClipDefaults, ClipRequest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.server.serving import Serving

CREATION_MS, DELAY_MS = 50.0, 100.0
ENGINE = "benchmarks.server_overhead:load"


class InstantEngine:
    """Takes no time: hands out one clip made at load."""

    defaults = ClipDefaults(width=64, height=64, frames=5, steps=2, guidance=1.0)
    layout = Layout()

    def __init__(self) -> None:
        frames = np.random.default_rng(0).integers(0, 256, (5, 64, 64, 3), np.uint8)
        self.clip = Clip(frames, None, 24.0, report={"seconds": {"denoise": 1e-3}})

    def generate(
        self, request: ClipRequest, on_step: Any = None, *, cache: str | None = None, on_frames: Any = None
    ) -> Clip:
        if on_frames is not None:
            on_frames(self.clip.frames)
        return self.clip

    def close(self) -> None:
        pass


def load(*_: Any, **__: Any) -> InstantEngine:
    return InstantEngine()


@dataclass
class Seen:
    """Seconds; `ended` holds the wall clock when a client read that a job was completed."""

    creation: list[float] = field(default_factory=list)
    reading: list[float] = field(default_factory=list)
    ended: dict[str, float] = field(default_factory=dict)
    refused: int = 0


async def client(http: httpx.AsyncClient, seen: Seen, rate: float, until: float) -> None:
    """One client: posts on schedule until the time is over, then waits for its jobs."""
    follows = []
    due = time.monotonic() + random.random() / rate
    while due < until:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        follows.append(asyncio.create_task(make_one(http, seen)))
        due += 1 / rate
    await asyncio.gather(*follows)


async def make_one(http: httpx.AsyncClient, seen: Seen) -> None:
    video = await create(http, seen)
    if video is None:
        return
    started = time.perf_counter()
    await http.get(f"/v1/videos/{video}")
    seen.reading.append(time.perf_counter() - started)
    name, was_open = "", False
    async with http.stream("GET", f"/v1/videos/{video}/events") as stream:
        async for line in stream.aiter_lines():
            if line.startswith("event: "):
                name = line[7:]
            elif line.startswith("data: ") and name == "snapshot":
                was_open = '"status": "completed"' not in line
            elif line.startswith("data: ") and name == "completed" and was_open:
                seen.ended[video] = time.time()


async def create(http: httpx.AsyncClient, seen: Seen) -> str | None:
    started = time.perf_counter()
    answer = await http.post("/v1/videos", json={"prompt": "a lamp", "sample_audio": False})
    if answer.status_code != 200:
        seen.refused += 1
        return None
    seen.creation.append(time.perf_counter() - started)
    return str(answer.json()["id"])


async def measure(url: str, clients: int, rate: float, seconds: float) -> tuple[Seen, Seen]:
    """The paced phase, then the burst."""
    limits = httpx.Limits(max_connections=4 * clients, max_keepalive_connections=4 * clients)
    async with httpx.AsyncClient(base_url=url, timeout=60, limits=limits) as http:
        await asyncio.gather(*(http.get("/livez") for _ in range(clients)))
        paced, burst = Seen(), Seen()
        until = time.monotonic() + seconds
        await asyncio.gather(*(client(http, paced, rate, until) for _ in range(clients)))
        await asyncio.gather(*(create(http, burst) for _ in range(clients)))
    return paced, burst


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--rate", type=float, default=0.5, help="posts a second of each client")
    parser.add_argument("--seconds", type=float, default=20)
    parser.add_argument("--json", type=Path, help="also write the result here")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="diptych-bench-") as folder:
        state = Path(folder) / "state"
        with Serving(state, "--max-queue", "100000", checkpoint="instant", engine=ENGINE) as serving:
            paced, burst = asyncio.run(measure(serving.url, asked.clients, asked.rate, asked.seconds))
        with sqlite3.connect(state / "jobs.db") as database:
            done = dict(database.execute("SELECT id, completed_ms FROM jobs WHERE status = 'completed'"))
    delays = [at - done[video] / 1000 for video, at in paced.ended.items()]
    result = {
        "clients": asked.clients,
        "rate": asked.rate,
        "cores": os.cpu_count(),
        "posts": len(paced.creation),
        "refused": paced.refused,
        "creation_ms": shown(paced.creation),
        "get_ms": shown(paced.reading),
        "event_delay_ms": shown(delays),
        "burst_creation_ms": shown(burst.creation),
    }
    print(json.dumps(result, indent=2))
    if asked.json:
        asked.json.write_text(json.dumps(result, indent=2) + "\n")
    good = result["creation_ms"]["p95"] < CREATION_MS and result["event_delay_ms"]["p95"] < DELAY_MS
    return 0 if good and not paced.refused else 1


def shown(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(1000 * s for s in seconds)
    at = [ordered[min(int(q * len(ordered)), len(ordered) - 1)] for q in (0.5, 0.95)]
    return {"n": len(ordered), "p50": round(at[0], 1), "p95": round(at[1], 1), "max": round(ordered[-1], 1)}


if __name__ == "__main__":
    sys.exit(main())
