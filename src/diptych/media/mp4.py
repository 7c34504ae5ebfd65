"""Clips as MP4, there and back: picture, sound, and in the file how it was made."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt

from diptych.errors import MediaError
from diptych.media.clip import Clip
from diptych.media.film import CRF, FINE, MARK, PRESET, Film
from diptych.request import ClipRequest, changed


def write(path: str | Path, clip: Clip, *, crf: int = CRF, preset: str = PRESET) -> Path:
    """Write `clip` to `path` as MP4, whole or not at all, as `Film` does; returns the path.

    Raises `MediaError` when the file cannot be written.
    """
    with Film(clip.fps, crf=crf, preset=preset) as film:
        film.add(clip.frames)
        return film.save(path, clip)


def to_bytes(clip: Clip) -> bytes:
    """The file that `write` would make."""
    with tempfile.TemporaryDirectory(prefix="diptych-") as folder:
        return write(Path(folder) / "clip.mp4", clip).read_bytes()


def read_clip(path: str | Path) -> Clip:
    """The frames, the sound (mixed to mono) and the report of an MP4, such as `write` makes; sound in its own rate.

    Raises `MediaError` for a file that is missing, no video, or cut short.
    """
    with _open(path) as container:
        if not container.streams.video:
            raise MediaError(f"cannot read {path}: it holds no video.")
        video = container.streams.video[0]
        audio = container.streams.audio[0] if container.streams.audio else None
        video.thread_type = "AUTO"
        mono = av.AudioResampler(format="fltp", layout="mono")
        pictures: list[npt.NDArray[np.uint8]] = []
        sounds: list[npt.NDArray[np.float32]] = []
        try:
            for frame in container.decode(*([video] if audio is None else [video, audio])):
                if isinstance(frame, av.VideoFrame):
                    pictures.append(frame.reformat(format="rgb24", interpolation=FINE).to_ndarray())
                else:
                    sounds.extend(part.to_ndarray()[0] for part in mono.resample(frame))
        except av.FFmpegError as error:
            raise MediaError(f"cannot read {path}: it is damaged ({error.strerror}).") from error
        if len(pictures) < max(video.frames, 1):
            raise MediaError(
                f"cannot read {path}: it is cut short, {len(pictures)} of {video.frames} frames are there."
            )
        sound = None
        if audio is not None:
            # The last packet of AAC is filled up with silence; the track says where the sound ends.
            length = round(audio.duration * audio.time_base * audio.rate) if audio.duration else None
            sound = np.concatenate(sounds)[:length] if sounds else np.zeros(0, dtype=np.float32)
        fps = float(video.average_rate or video.base_rate or 0)
        sample_rate = 44_100 if audio is None else audio.rate
        return Clip(np.stack(pictures), sound, fps, sample_rate, _report(container) or {})


def read_report(path: str | Path) -> dict[str, Any]:
    """How a clip was made, from its file. Raises `MediaError` for a file that does not tell."""
    with _open(path) as container:
        report = _report(container)
    if report is None:
        raise MediaError(f"{path} does not say how it was made: it is not from Diptych, or its metadata was removed.")
    return report


def read_request(path: str | Path, **changes: Any) -> ClipRequest:
    """The request that makes the clip of this file again, with the seed that was drawn; `changes` replace fields.

    Raises `MediaError` for a file that does not tell, or a first frame that was given as bytes and is not there;
    `RequestError` for a field that is not accepted.
    """
    values = read_report(path).get("request")
    if not isinstance(values, dict):
        raise MediaError(f"{path} does not hold the request it was made from.")
    values = changed(values, changes)
    if values.get("image") == "<embedded>":
        raise MediaError(f"{path} was made from an image that is not in the file; give the image again.")
    return ClipRequest.from_dict(values)


def _open(path: str | Path) -> Any:
    if Path(path).is_dir():
        raise MediaError(f"cannot read {path}: is a directory.")
    try:
        # Only a file, and only MP4: FFmpeg takes addresses for names, and follows play lists wherever they lead.
        return av.open(f"file:{os.fspath(path)}", "r", format="mp4", metadata_errors="replace")
    except av.FFmpegError as error:
        if isinstance(error, OSError):
            raise MediaError(f"cannot read {path}: {(error.strerror or str(error)).lower()}.") from error
        raise MediaError(f"cannot read {path}: it is not a video file.") from error


def _report(container: Any) -> dict[str, Any] | None:
    try:
        held = json.loads(container.metadata.get("comment", ""))
    except (ValueError, RecursionError):
        return None
    report = held.get("report") if isinstance(held, dict) and MARK in held else None
    return report if isinstance(report, dict) else None
