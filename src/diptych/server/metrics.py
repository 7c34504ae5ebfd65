"""What Prometheus reads: one registry for each server."""

from __future__ import annotations

import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from diptych.server.store.jobs import JobStore

_SECONDS = (0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 3600)


class Metrics:
    """Names and labels of videos-api, section 15."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def make(kind: Any, name: str, text: str, *labels: str, **more: Any) -> Any:
            return kind(name, text, labels, registry=self.registry, **more)

        self.running = make(Gauge, "diptych_requests_running", "Jobs being made.")
        self.waiting = make(Gauge, "diptych_requests_waiting", "Jobs in the queue.")
        self.requests = make(Counter, "diptych_requests", "Jobs that ended.", "status", "task")
        self.latency = make(
            Histogram, "diptych_request_latency_seconds", "From acceptance to the end.", buckets=_SECONDS
        )
        self.queue_wait = make(
            Histogram, "diptych_queue_wait_seconds", "From acceptance to the start.", buckets=_SECONDS
        )
        self.stage = make(Histogram, "diptych_stage_seconds", "Time of one stage.", "stage", buckets=_SECONDS)
        self.step = make(Histogram, "diptych_denoise_step_seconds", "Time of one denoising step.", buckets=_SECONDS)
        self.peak_memory = make(Gauge, "diptych_peak_memory_bytes", "GPU memory of the latest job.", "rank")
        self.rejected = make(Counter, "diptych_admission_rejected", "Requests not admitted.", "reason")
        self.invalid = make(Counter, "diptych_output_rejected", "Clips that failed their check.", "reason")
        self.failed = make(Counter, "diptych_jobs_failed", "Jobs that failed, by code.", "code")
        self.cancel = make(Histogram, "diptych_cancel_seconds", "From the wish to stop to the free engine.")
        self.jobs = make(Gauge, "diptych_jobs", "Jobs in the store.", "status")
        self.stored = make(Gauge, "diptych_store_bytes", "Bytes of finished clips.")
        self.heartbeat = make(Gauge, "diptych_engine_heartbeat_age_seconds", "Since the engine was heard.", "engine")
        self.ready = make(Gauge, "diptych_engine_ready", "1 if the engine takes jobs.", "engine")
        self.restarts = make(Counter, "diptych_engine_restarts", "Engine processes that had to be replaced.")
        self.answers = make(Counter, "diptych_http_answers", "HTTP answers.", "status")

    def render(self, store: JobStore, engines: dict[str, tuple[bool, float]]) -> bytes:
        """The text format. `engines`: ready, and when last heard (monotonic), by name."""
        counts, stored = store.counts()
        for status, number in counts.items():
            self.jobs.labels(status).set(number)
        self.running.set(counts["in_progress"])
        self.waiting.set(counts["queued"])
        self.stored.set(stored)
        for name, (ready, heard) in engines.items():
            self.ready.labels(name).set(int(ready))
            self.heartbeat.labels(name).set(time.monotonic() - heard)
        return generate_latest(self.registry)
