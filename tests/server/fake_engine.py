"""An engine without a model: clips of coloured stripes, made as fast or slowly, or as badly, as the prompt says.

Words in the prompt steer it: `slow=0.2` sleeps that long in each step, `busy=1` computes in Python instead, `die=3`
kills the process in step 3, `hang=2` stops telling anything in step 2, `boom` raises, `poison` sends what is no
message, `noise` fills the picture with noise, `flat` gives a flat one, `short` cuts the sound, `small` gives another
size, `refuse` refuses the request, `oom` runs out of memory, `deaf=1` ignores the wish to stop that long,
`child=9` starts a process in a session of its own.
Every finished step is written to the file named by DIPTYCH_TEST_STEPS, so that a test can count them.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from diptych.errors import Cancelled, CheckpointError, RequestError
from diptych.media.clip import Clip
from diptych.parallel.layout import Layout
from diptych.request import ClipDefaults, ClipRequest


@dataclass(frozen=True)
class Report:
    """As `diptych.engine.progress.Progress`, which would import torch."""

    stage: str
    done: int
    total: int
    seconds: float = 0.0
    left: float | None = None
    preview: Any = None


DEFAULTS = ClipDefaults(width=96, height=64, frames=9, fps=24.0, steps=4, guidance=5.0)


class FakeEngine:
    defaults = DEFAULTS
    layout = Layout()

    def __init__(self) -> None:
        self.steps_file = os.environ.get("DIPTYCH_TEST_STEPS")

    def preview_picture(self, _latents: Any) -> bytes:
        import io

        from PIL import Image

        out = io.BytesIO()
        Image.new("RGB", (48, 32), (120, 80, 200)).save(out, "JPEG")
        return out.getvalue()

    def generate(
        self, request: ClipRequest, on_step: Any = None, *, cache: str | None = None, on_frames: Any = None
    ) -> Clip:
        asked = request.resolve(self.defaults)
        prompt = request.prompt[:200]
        words = dict(re.findall(r"(\w+)=([\d.]+)", prompt)) | dict.fromkeys(prompt.split(), "")
        if "child" in words:
            subprocess.Popen(["sleep", words["child"]], start_new_session=True)
        if "refuse" in words:
            raise RequestError("prompt", request.prompt, "something else")
        if "oom" in words:
            raise MemoryError
        tell = on_step or (lambda report: None)
        tell(Report("text", 1, 1, 0.01))
        started = time.perf_counter()
        for step in range(1, asked.steps + 1):
            time.sleep(float(words.get("slow", 0)))
            busy_until = time.perf_counter() + float(words.get("busy", 0))
            while time.perf_counter() < busy_until:
                pass
            if words.get("die") == str(step):
                os.kill(os.getpid(), signal.SIGKILL)
            if words.get("hang") == str(step):
                time.sleep(1000)
            if "poison" in words:
                Connection(int(sys.argv[1])).send({"no": "message"})
                time.sleep(1000)
            if "boom" in words and step == 2:
                raise RuntimeError("a kernel failed")
            self._count(request, step)
            took = time.perf_counter() - started
            report = Report("denoise", step, asked.steps, took, took / step * (asked.steps - step), lambda: None)
            try:
                tell(report)
            except Cancelled:
                time.sleep(float(words.get("deaf", 0)))
                raise
        tell(Report("decode", 1, 1, 0.01))
        clip = self._clip(request, asked, words)
        for first in range(0, len(clip.frames), 4):
            if on_frames is not None:
                on_frames(clip.frames[first : first + 4])
        return clip

    def _count(self, request: ClipRequest, step: int) -> None:
        if self.steps_file:
            with open(self.steps_file, "a") as file:  # noqa: PTH123
                file.write(f"{request.prompt}|{request.seed}|{step}\n")

    def _clip(self, request: ClipRequest, asked: Any, words: dict[str, str]) -> Clip:
        T, H, W = asked.frames, asked.height, asked.width
        rows, columns = np.mgrid[0:H, 0:W]
        frames = np.empty((T, H, W, 3), np.uint8)
        for t in range(T):
            frames[t, ..., 0] = (columns * 255 // W + 8 * t + (request.seed or 0)) % 256
            frames[t, ..., 1] = rows * 255 // H
            frames[t, ..., 2] = 128
        audio = None
        if request.audio:
            audio = np.sin(np.arange(asked.samples, dtype=np.float32) * 0.06).astype(np.float32) * 0.5
        if "noise" in words:
            frames = np.random.default_rng(0).integers(0, 256, frames.shape, np.uint8)
        if "flat" in words:
            frames[:] = 7
        if "short" in words:
            audio = audio[: len(audio) // 2]
        if "small" in words:
            frames = np.ascontiguousarray(frames[:, :32])
        seconds = {"text": 0.01, "denoise": 0.1, "decode": 0.02}
        return Clip(frames, audio, asked.fps, report={"request": {"prompt": request.prompt}, "seconds": seconds})

    def close(self) -> None:
        pass


def load(checkpoint: str, *, on_progress: Any = None, **_options: Any) -> FakeEngine:
    time.sleep(float(os.environ.get("DIPTYCH_TEST_LOAD", "0")))
    if checkpoint == "broken":
        raise CheckpointError("the checkpoint is broken")
    engine = FakeEngine()
    if checkpoint == "distilled":
        engine.defaults = replace(DEFAULTS, steps=2, guidance=1.0, distilled=True)
    return engine
