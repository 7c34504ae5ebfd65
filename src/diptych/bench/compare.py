"""Two clips held against each other: how far one setting strays from another, picture by picture and in the sound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diptych.bench.compare_picture import psnr, ssim, temporal_difference
from diptych.bench.compare_sound import log_mel_distance, si_sdr
from diptych.errors import MediaError
from diptych.media.clip import Clip

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Comparison:
    """B against A, which counts as the truth. psnr, ssim, lpips: one a frame; dB are infinite where nothing differs.

    psnr in dB; ssim up to 1; temporal: mean difference of the changes from frame to frame, of 255; log_mel in dB;
    si_sdr in dB. Sound is None where a clip has none, lpips where its package or weights are not there.
    seconds: how long each picture lasts; sound_seconds: each sound.
    """

    psnr: Array
    ssim: Array
    temporal: float
    seconds: tuple[float, float]
    sound_seconds: tuple[float | None, float | None]
    log_mel: float | None = None
    si_sdr: float | None = None
    lpips: Array | None = field(default=None)

    @property
    def figures(self) -> dict[str, float | None]:
        """The figures that a limit can be set to, by name."""
        return {
            "psnr": float(self.psnr.mean()),
            "worst_psnr": float(self.psnr.min()),
            "ssim": float(self.ssim.mean()),
            "worst_ssim": float(self.ssim.min()),
            "temporal": self.temporal,
            "log_mel": self.log_mel,
            "si_sdr": self.si_sdr,
            "lpips": None if self.lpips is None else float(self.lpips.mean()),
            "worst_lpips": None if self.lpips is None else float(self.lpips.max()),
            "duration": abs(self.seconds[0] - self.seconds[1]),
        }

    @property
    def worst(self) -> int:
        """The frame that differs most."""
        return int(self.psnr.argmin())

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it: infinite decibels are null, and `identical` says whether every frame is the same."""
        figures = {name: _finite(value) for name, value in self.figures.items()}
        return figures | {
            "identical": bool(np.isinf(self.psnr).all()),
            "frames": len(self.psnr),
            "worst_frame": self.worst,
            "seconds": list(self.seconds),
            "sound_seconds": list(self.sound_seconds),
            "psnr_of_frames": [_finite(value) for value in self.psnr.tolist()],
            "ssim_of_frames": self.ssim.tolist(),
        }

    def beyond(self, limits: dict[str, float]) -> list[str]:
        """A sentence for each limit that is not kept. Raises `MediaError` for one on a figure that is not there."""
        broken = []
        for name, limit in limits.items():
            value = self.figures[name]
            if value is None:
                raise MediaError(f"cannot hold {name} to {limit:g}: {_MISSING.get(name, 'a clip has no sound')}.")
            low = name in AT_LEAST
            if (value < limit) if low else (value > limit):
                broken.append(f"{name} is {value:.4g}, {'below' if low else 'above'} {limit:g}")
        return broken


AT_LEAST = ("psnr", "worst_psnr", "ssim", "worst_ssim", "si_sdr")
"""Figures of which more is better."""
_NO_LPIPS = "the package lpips and the AlexNet weights it needs are not here"
_MISSING = {"lpips": _NO_LPIPS, "worst_lpips": _NO_LPIPS}


def compare(a: Clip, b: Clip) -> Comparison:
    """Hold `b` against `a`, over the frames and samples that both have.

    Raises `MediaError` for clips of different size or sampling rate.
    """
    if a.frames.shape[1:] != b.frames.shape[1:]:
        raise MediaError(
            f"cannot compare pictures of {a.width}x{a.height} and {b.width}x{b.height}: make both of one size."
        )
    count = min(len(a.frames), len(b.frames))
    one, other = a.frames[:count], b.frames[:count]
    mel = ratio = None
    if a.audio is not None and b.audio is not None:
        if a.sample_rate != b.sample_rate:
            raise MediaError(f"cannot compare sound at {a.sample_rate} and {b.sample_rate} Hz: make both of one rate.")
        samples = min(len(a.audio), len(b.audio))
        sound = a.audio[:samples], b.audio[:samples]
        mel, ratio = log_mel_distance(*sound, a.sample_rate), si_sdr(*sound)
    return Comparison(
        psnr(one, other),
        ssim(one, other),
        temporal_difference(one, other),
        (a.seconds, b.seconds),
        (_lasting(a), _lasting(b)),
        mel,
        ratio,
        _lpips(one, other),
    )


def pairs(a: Path, b: Path) -> list[tuple[Path, Path]]:
    """The files to compare: two clips, or the clips of two folders that are called alike.

    Raises `MediaError` where there is no such pair, or a clip has no partner.
    """
    if not a.is_dir() or not b.is_dir():
        if a.is_dir() or b.is_dir():
            raise MediaError(f"cannot compare {a} with {b}: give two files or two folders.")
        return [(a, b)]
    names = [{path.name for path in folder.glob("*.mp4")} for folder in (a, b)]
    alone = sorted(names[0] ^ names[1])
    if alone:
        raise MediaError(f"cannot compare {a} with {b}: {alone[0]} is in one of them only.")
    if not names[0]:
        raise MediaError(f"cannot compare {a} with {b}: neither holds an MP4.")
    return [(a / name, b / name) for name in sorted(names[0])]


def compare_files(
    a: Path, b: Path, on_pair: Callable[[Path, Clip, Clip, Comparison], None] | None = None
) -> dict[str, Comparison]:
    """Compare what `pairs` finds, by name of the second file. on_pair: told each, with both clips."""
    from diptych.media.mp4 import read_clip  # PyAV: clips that never were a file do without

    results = {}
    for one, other in pairs(a, b):
        clips = read_clip(one), read_clip(other)
        results[other.name] = compare(*clips)
        if on_pair is not None:
            on_pair(other, *clips, results[other.name])
    return results


def table(results: dict[str, Comparison]) -> str:
    """A line for each pair."""
    heads = ("PSNR", "worst", "SSIM", "worst", "temporal", "log-mel", "SI-SDR", "LPIPS", "worst")
    names = ("psnr", "worst_psnr", "ssim", "worst_ssim", "temporal", "log_mel", "si_sdr", "lpips", "worst_lpips")
    width = max(len("clip"), *(len(name) for name in results))
    lines = [f"{'clip':{width}}" + "".join(f"{head:>10}" for head in heads)]
    for name, result in results.items():
        cells = ("-" if (v := result.figures[n]) is None else f"{v:.4f}" if "ssim" in n else f"{v:.2f}" for n in names)
        lines.append(f"{name:{width}}" + "".join(f"{cell:>10}" for cell in cells))
    return "\n".join(lines)


def _lasting(clip: Clip) -> float | None:
    return None if clip.audio is None else len(clip.audio) / clip.sample_rate


def _finite(value: float | None) -> float | None:
    return value if value is not None and np.isfinite(value) else None


def _lpips(one: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> Array | None:
    """LPIPS of each frame (AlexNet), where its package and weights are here; nothing is downloaded."""
    from importlib.util import find_spec

    import torch

    weights = Path(torch.hub.get_dir()) / "checkpoints" / "alexnet-owt-7be5be79.pth"
    if find_spec("lpips") is None or not weights.is_file():
        return None
    import lpips

    with torch.no_grad():
        measure = lpips.LPIPS(net="alex", verbose=False).eval()
        distances = [
            measure(*(torch.from_numpy(x).permute(2, 0, 1)[None].float() / 127.5 - 1 for x in frames)).item()
            for frames in zip(one, other, strict=True)
        ]
    return np.asarray(distances)
