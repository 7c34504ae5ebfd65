"""From finished latents to frames, sound and file: what runs side by side, beside the same work one after the other."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from diptych.bench.geometry import Geometry
from diptych.bench.random_clip import Decoders
from diptych.bench.timing import once, peak_memory
from diptych.codecs.audio import decode_audio
from diptych.codecs.tiles import plan_tiles
from diptych.codecs.video import Canvas, OnFrames, decode_cost, decode_tile, decode_video
from diptych.media.clip import Clip
from diptych.request import AUDIO_RATE
from h200_common import DEVICE, SIZE, TINY, randn, wait

FPS = 24.0
Made = tuple[npt.NDArray[np.uint8], npt.NDArray[np.float32]]


class Work:
    """The decoders of the released checkpoints with random weights, and the latents of one clip."""

    def __init__(self) -> None:
        size = Geometry.parse("96x64x37") if TINY else SIZE
        self.decoders = Decoders.random(DEVICE, small=TINY)
        self.plan = plan_tiles(*size.latents, None, decode_cost(self.decoders.vae))
        self.video = randn(1, 16, *size.latents).float()
        self.audio = randn(1, 40, size.audio_tokens).float()
        self.samples = round(size.frames / FPS * AUDIO_RATE)

    def sound(self) -> npt.NDArray[np.float32]:
        d = self.decoders
        return decode_audio(d.audio_vae, d.vocoder, self.audio, self.samples)

    def tiles_alone(self) -> None:
        """What nothing can hide: tiles decoded and blended, frames left where they are."""
        canvas = Canvas(self.plan)
        for tile in self.plan.tiles:
            canvas.add(tile, decode_tile(self.decoders.vae, self.video[0], tile).float())

    def in_turn(self) -> Made:
        """Sound, then tile by tile, each window waited for and copied before the next tile is started."""
        sound, canvas = self.sound(), Canvas(self.plan)
        frames = np.empty((self.plan.frames, self.plan.height, self.plan.width, 3), np.uint8)
        for tile in self.plan.tiles:
            finished = canvas.add(tile, decode_tile(self.decoders.vae, self.video[0], tile).float())
            if finished is not None:
                assert bool(finished.finite)
                part = finished.frames_FHWC.cpu().numpy()
                frames[finished.low : finished.low + len(part)] = part
        return np.stack([frames]), sound

    def together(self, on_frames: OnFrames | None = None) -> Made:
        """As the engine does it."""
        sounds: list[npt.NDArray[np.float32]] = []
        frames = decode_video(
            self.decoders.vae,
            self.video,
            self.plan,
            meanwhile=lambda: sounds.append(self.sound()),
            on_frames=on_frames,
        )
        return frames, sounds[0]


def finish(repeats: int = 3) -> dict[str, Any]:
    """Both orders in turns: medians, peak memory, whether the bits agree; with PyAV also until the MP4 is there.

    Pictures of random weights are noise, which costs an encoder more than a picture does.
    """
    work = Work()
    orders: dict[str, Callable[[], Made]] = {"in turn": work.in_turn, "together": work.together}
    made = {name: call() for name, call in orders.items()}  # compiles and warms up
    result: dict[str, Any] = {
        "windows": len(work.plan.tiles),
        "frames MB": made["together"][0].nbytes / 1e6,
        "bits equal": all(np.array_equal(*pair) for pair in zip(*made.values(), strict=True)),
    }
    parts: dict[str, Callable[[], object]] = {"sound alone": work.sound, "tiles alone": work.tiles_alone, **orders}
    times: dict[str, list[float]] = {name: [] for name in parts}
    for _ in range(repeats):
        for name, call in parts.items():
            times[name].append(once(call, DEVICE))
    result |= {f"{name} s": [statistics.median(values), *values] for name, values in times.items()}
    result |= {f"{name}, peak GiB": peak_memory(call, DEVICE) / 2**30 for name, call in orders.items()}
    if importlib.util.find_spec("av") is None:
        return result | {"MP4": "left out: PyAV is not installed here"}
    return result | files(work, repeats)


def files(work: Work, repeats: int) -> dict[str, Any]:
    """Seconds from latents to a finished MP4, and of them after the last frame was decoded."""
    from diptych.media.film import Film

    def in_turn(path: Path) -> float:
        frames, sound = work.in_turn()
        decoded = time.perf_counter()
        Clip(frames[0], sound[0], FPS).save(path)
        return decoded

    def together(path: Path) -> float:
        with Film(FPS) as film:
            frames, sound = work.together(lambda _, part: film.add(part))
            decoded = time.perf_counter()
            film.save(path, Clip(frames[0], sound[0], FPS))
            return decoded

    result: dict[str, Any] = {"MP4, in turn s": [], "MP4, together s": []}
    with TemporaryDirectory(prefix="finish-") as folder:
        for _ in range(repeats):
            for name, call in (("in turn", in_turn), ("together", together)):
                wait()
                start = time.perf_counter()
                decoded = call(Path(folder) / f"{name}.mp4")
                end = time.perf_counter()
                result[f"MP4, {name} s"].append({"all": end - start, "after the last frame": end - decoded})
    return result
