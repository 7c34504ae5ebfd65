"""What encoding adds to a clip when it waits for the last frame, and when it runs while the frames are decoded.

    python benchmarks/encode_meanwhile.py OUT.json [CLIP.mp4] [--decode=2.47] [--repeats=3]

A GPU that decodes is played by waiting: windows of 125 frames of 864x480 come at even times within `--decode` seconds.
Textured frames are made here; the pictures of CLIP.mp4, if given, are enlarged and shown as often as needed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
from PIL import Image

from diptych.bench.geometry import Geometry
from diptych.codecs.tiles import plan_tiles
from diptych.media.clip import Clip
from diptych.media.film import Film
from diptych.media.mp4 import read_clip

SIZE = Geometry.parse("864x480x125")
FPS = 24.0
Frames = npt.NDArray[np.uint8]


def textured() -> Frames:
    """Two layers of noise with the spectrum of a photograph, drifting apart, the nearer seen through a disc that
    moves, and a little grain.
    """
    random = np.random.default_rng(0)
    height, width = SIZE.height + 200, SIZE.width + 400
    pitch = np.hypot(np.fft.fftfreq(height)[:, None], np.fft.rfftfreq(width)[None])
    pitch[0, 0] = 1
    waves = [(random.normal(size=pitch.shape) + 1j * random.normal(size=pitch.shape)) / pitch**1.1 for _ in range(3)]
    layers = [np.fft.irfft2(wave, s=(height, width)) for wave in waves]
    colours = np.array([[1.0, 0.7, 0.6], [0.2, 0.3, 0.1], [0.1, 0.1, 0.4]])
    far = np.stack([layer / layer.std() for layer in layers], axis=-1) @ colours * 40 + 120
    near = far[::-1]
    rows, columns = np.mgrid[: SIZE.height, : SIZE.width]
    frames = np.empty((SIZE.frames, SIZE.height, SIZE.width, 3), np.uint8)
    for t, frame in enumerate(frames):
        disc = (rows - 240 - 60 * np.sin(t / 15)) ** 2 + (columns - 200 - 3 * t) ** 2 < 120**2
        behind = far[t // 2 :, 2 * t :][: SIZE.height, : SIZE.width]
        before = near[100:, 300 - t :][: SIZE.height, : SIZE.width]
        grain = random.normal(0, 2, (SIZE.height, SIZE.width, 1))
        frame[:] = np.clip(np.where(disc[..., None], before, behind) + grain, 0, 255)
    return frames


def enlarged(path: Path) -> Frames:
    pictures = read_clip(path).frames
    shown = np.linspace(0, len(pictures) - 1, SIZE.frames).astype(int)
    return np.stack([np.asarray(Image.fromarray(pictures[n]).resize((SIZE.width, SIZE.height))) for n in shown])


def windows() -> list[slice]:
    """The frames that each window of the default plan finishes."""
    spans = [tile.t for tile in plan_tiles(*SIZE.latents).tiles]
    return [slice(span.low, span.high - span.fall) for span in spans]


def measured(frames: Frames, decode: float, folder: Path) -> dict[str, float]:
    clip = Clip(frames, None, FPS)
    start = time.perf_counter()
    clip.save(folder / "afterwards.mp4")
    afterwards = time.perf_counter() - start
    with Film(FPS) as film:
        start = time.perf_counter()
        for number, part in enumerate(windows(), start=1):
            time.sleep(max(0.0, start + decode * number / len(windows()) - time.perf_counter()))
            film.add(frames[part])
        last = time.perf_counter()
        size = film.save(folder / "meanwhile.mp4", clip).stat().st_size
        meanwhile = time.perf_counter() - last
    return {"afterwards s": afterwards, "meanwhile, after the last frame s": meanwhile, "MB": size / 1e6}


def main() -> None:
    out, *rest = [text for text in sys.argv[1:] if not text.startswith("--")]
    options = dict(text[2:].split("=") for text in sys.argv if text.startswith("--"))
    decode, repeats = float(options.get("decode", 2.47)), int(options.get("repeats", 3))
    pictures = {"textured": textured()} | {f"{Path(path).name}, enlarged": enlarged(Path(path)) for path in rest}
    result = {"cores": os.cpu_count(), "decode s": decode}
    with TemporaryDirectory(prefix="encode-") as folder:
        for name, frames in pictures.items():
            result[name] = [measured(frames, decode, Path(folder)) for _ in range(repeats)]
            print(name, *result[name], sep="\n  ", flush=True)
    Path(out).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
