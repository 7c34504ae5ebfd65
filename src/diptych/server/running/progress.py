"""How far a job is, from what its engine tells: one number that only rises, and how long to wait for the next."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from diptych.server.running.messages import Step

_SPANS = {"text": (1, 2), "image": (1, 2), "denoise": (2, 90), "decode": (91, 97), "mux": (98, 99)}
TELL_EVERY = 0.2


@dataclass
class Tracker:
    """Progress of one attempt. All durations are measured with the monotonic clock: the wall clock may jump."""

    outputs: int
    stall_timeout: float
    progress: int = 1
    stage: str | None = None
    heard: float = field(default_factory=time.monotonic)
    told: float = 0.0
    steps: list[float] = field(default_factory=list)
    _step: tuple[int, int] = (0, 0)

    def take(self, step: Step) -> tuple[dict[str, Any] | None, float | None]:
        """What to store now, if anything, and the seconds of the denoising step that ended, if one did."""
        now = time.monotonic()
        seconds = None
        if step.stage == "denoise":
            if self.stage == "denoise" and self._step[0] == step.output and step.done > self._step[1]:
                seconds = (now - self.heard) / (step.done - self._step[1])
                self.steps.append(seconds)
            self._step = (step.output, step.done)
        self.heard = now
        low, high = _SPANS.get(step.stage, (1, 1))
        within = low + (high - low) * (step.done / step.total if step.total else 0)
        self.progress = max(self.progress, min(int((step.output * 100 + within) / self.outputs), 99))
        fresh = step.stage != self.stage or (step.stage == "denoise" and step.done == step.total)
        self.stage = step.stage
        if not fresh and now - self.told < TELL_EVERY and step.preview is None:
            return None, seconds
        self.told = now
        live: dict[str, Any] = {"progress": self.progress, "stage": step.stage}
        if step.stage == "denoise":
            live |= {"step": step.done, "total_steps": step.total}
        if step.left is not None:
            live["eta_ms"] = int(step.left * 1000)
        return live, seconds

    @property
    def limit(self) -> float:
        """Seconds without a sign of life after which the engine is taken for hung."""
        return max(self.stall_timeout, 10 * statistics.median(self.steps)) if self.steps else self.stall_timeout
