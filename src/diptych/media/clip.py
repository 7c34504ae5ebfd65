"""A finished clip: pictures, sound, and the report of how it was made."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from diptych.errors import ClipError, MediaError
from diptych.request import ResolvedRequest

FLAT = 1.0
"""A clip is flat when the standard deviation of its values, over all pixels, frames and colours, is below 1 of 255."""
SILENCE = 1e-4
"""A sound is silent when its peak is below this: 80 dB under full scale."""
_ASKS_SILENCE = re.compile(r"\b(silen(ce|t|tly)|soundless(ly)?|noiseless(ly)?|(without|no) (a |any )?sounds?)\b", re.I)


@dataclass(frozen=True)
class Clip:
    """frames: uint8 (T, H, W, 3); audio: float32 (samples,) in [-1, 1], or None; fps: frames a second.

    report: what was asked and what was run: request, seed, layout, precision, forwards, seconds per stage. It must
    be JSON; `report["request"]` is `ClipRequest.to_dict()` with the seed that was drawn.
    latents: what the frames were decoded from, float32: `video` (C, T, Y, X) and, with sound, `audio` (C, A); empty for
    a clip that was read from a file.
    """

    frames: npt.NDArray[np.uint8]
    audio: npt.NDArray[np.float32] | None
    fps: float
    sample_rate: int = 44_100
    report: dict[str, Any] = field(default_factory=dict)
    latents: dict[str, npt.NDArray[np.float32]] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        assert self.frames.dtype == np.uint8
        assert self.frames.ndim == 4
        assert self.frames.shape[3] == 3
        assert self.audio is None or (self.audio.dtype == np.float32 and self.audio.ndim == 1)

    @property
    def height(self) -> int:
        return int(self.frames.shape[1])

    @property
    def width(self) -> int:
        return int(self.frames.shape[2])

    @property
    def seconds(self) -> float:
        """How long the picture lasts."""
        return len(self.frames) / self.fps

    def __repr__(self) -> str:
        sound = "no sound" if self.audio is None else f"sound at {self.sample_rate} Hz"
        return f"Clip({len(self.frames)} frames of {self.width}x{self.height} at {self.fps:g} fps, {sound})"

    def save(self, path: str | Path) -> Path:
        """Write an MP4 with the report in it; a file that stood there is replaced only once the new one is complete.

        Raises `MediaError` where that cannot be done, and leaves nothing behind.
        """
        from diptych.media.mp4 import write  # mp4 reads clips, so it stands above this file

        return write(path, self)

    def save_latents(self, path: str | Path) -> Path:
        """Write the latents as safetensors, with a batch axis in front, as diffusers' `output_type="latent"` has them.

        Raises `MediaError` where that cannot be done, and leaves nothing behind.
        """
        from safetensors.numpy import save_file

        from diptych.media.files import replacing

        if not self.latents:
            raise MediaError(f"cannot write {path}: this clip has no latents, since it was read from a file.")
        with replacing(path) as temporary:
            save_file({name: np.ascontiguousarray(value[None]) for name, value in self.latents.items()}, temporary)
        return Path(path)

    def check(self, asked: ResolvedRequest | None = None) -> None:
        """Raise `ClipError`, naming what is wrong, for a clip that must not be called finished.

        Always: there are frames, the picture is not flat (`FLAT`), the sound is finite, not silent (`SILENCE`) and
        ends within one frame of the picture. Against a request: size, frames and rate are the ones asked for, and
        there is sound exactly when it was asked for; a prompt that speaks of silence may be answered with it.
        """
        if not len(self.frames):
            raise ClipError("the clip has no frames.")
        if asked is not None:
            self._check_asked(asked)
        level, spread = _level(self.frames)
        if spread < FLAT:
            raise ClipError(
                f"the picture is flat: its values stay near {level:.0f} of 255 (standard deviation {spread:.2f}, "
                f"below {FLAT:g})."
            )
        if self.audio is not None:
            self._check_sound(self.audio, asked is not None and bool(_ASKS_SILENCE.search(asked.request.prompt)))

    def _check_asked(self, asked: ResolvedRequest) -> None:
        for name, have, want in (
            ("width", self.width, asked.width),
            ("height", self.height, asked.height),
            ("frames", len(self.frames), asked.frames),
            ("fps", self.fps, asked.fps),
        ):
            if have != want:
                raise ClipError(f"the clip has {name} {have:g}, but {want:g} was asked for.")
        if asked.request.audio and self.audio is None:
            raise ClipError("the clip has no sound, but sound was asked for.")
        if not asked.request.audio and self.audio is not None:
            raise ClipError("the clip has sound, but none was asked for.")

    def _check_sound(self, audio: npt.NDArray[np.float32], may_be_silent: bool) -> None:
        if not np.isfinite(audio).all():
            raise ClipError("the sound is not finite: it holds NaN or infinite samples.")
        seconds = len(audio) / self.sample_rate
        if abs(seconds - self.seconds) > 1 / self.fps:
            raise ClipError(f"the sound lasts {seconds:.3f} s and the picture {self.seconds:.3f} s.")
        peak = float(np.abs(audio).max())
        if peak < SILENCE and not may_be_silent:
            raise ClipError(f"the sound is silent: its peak is {peak:.1e} of full scale, below {SILENCE:g}.")

    def _repr_html_(self) -> str:
        """The clip as a notebook shows it: a video element with the MP4 inside."""
        from diptych.media.mp4 import to_bytes

        data = base64.b64encode(to_bytes(self)).decode()
        muted = "" if self.audio is not None else " muted"
        return (
            f'<video controls loop{muted} width="{self.width}" height="{self.height}" '
            f'style="max-width: 100%; height: auto" src="data:video/mp4;base64,{data}"></video>'
        )


def _level(frames: npt.NDArray[np.uint8]) -> tuple[float, float]:
    """Mean and standard deviation of all values; frame by frame, since a float copy of a clip fills gigabytes."""
    counts = sum(np.bincount(frame.ravel(), minlength=256) for frame in frames)
    values = np.arange(256)
    mean = np.average(values, weights=counts)
    return float(mean), float(np.sqrt(np.average((values - mean) ** 2, weights=counts)))
