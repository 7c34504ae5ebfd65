"""Clips as MP4: H.264 and AAC, the sound in step with the picture, and in the file how it was made."""

from __future__ import annotations

import json
import os
import tempfile
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import numpy.typing as npt
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc, Interpolation

from diptych.errors import MediaError
from diptych.media.clip import Clip
from diptych.media.files import replacing
from diptych.request import ClipRequest, changed

CRF = 17
"""x264's constant rate factor: here the eye sees no difference from the frames."""
AUDIO_BITS = 160_000
"""Bits a second of the AAC track; mono."""

_MARK = "diptych-clip"
_FINE = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT | Interpolation.FULL_CHR_H_INP


def write(path: str | Path, clip: Clip, *, crf: int = CRF, preset: str = "medium") -> Path:
    """Write `clip` to `path` as MP4 with its index in front, whole or not at all; returns the path.

    H.264 High, yuv420p with BT.709 tags; AAC mono at the clip's sample rate. Every frame is kept, at the exact rate
    of `exact_rate`; sound begins with the picture and ends at its own last sample. The report stands in the comment.
    crf: x264's constant rate factor, 0 (lossless) to 51. preset: x264's, `ultrafast` to `veryslow`.
    Raises `MediaError` when the file cannot be written.
    """
    with replacing(path) as temporary:
        try:
            _encode(temporary, clip, _x264(clip.width, crf, preset))
        except av.FFmpegError as error:
            if isinstance(error, OSError):
                raise
            raise MediaError(f"cannot write {path}: the encoder refused the clip ({error.strerror}).") from error
    return Path(path)


def to_bytes(clip: Clip) -> bytes:
    """The file that `write` would make."""
    with tempfile.TemporaryDirectory(prefix="diptych-") as folder:
        return write(Path(folder) / "clip.mp4", clip).read_bytes()


def exact_rate(fps: float) -> Fraction:
    """Frames a second as a fraction: 24 -> 24, 12.5 -> 25/2, and 23.976, 29.97, 59.94 -> 24000, 30000, 60000 / 1001."""
    film = Fraction(round(fps * 1.001) * 1000, 1001)
    if abs(film - Fraction(fps)) < Fraction(fps) / 100_000:
        return film
    return Fraction(fps).limit_denominator(10_000)


def _encode(path: Path, clip: Clip, x264: dict[str, str]) -> None:
    if clip.width % 2 or clip.height % 2:
        raise MediaError(f"a clip of {clip.width}x{clip.height} cannot be written: both sides must be even.")
    rate = exact_rate(clip.fps)
    # Times in samples, not milliseconds, so that the end of the sound is not rounded.
    options = {"movflags": "+faststart", "movie_timescale": str(clip.sample_rate)}
    with av.open(str(path), "w", format="mp4", options=options) as container:
        container.metadata["comment"] = _comment(clip)
        video = container.add_stream("libx264", rate=rate, options=x264)
        video.width, video.height, video.pix_fmt = clip.width, clip.height, "yuv420p"
        context = video.codec_context
        context.color_range = ColorRange.MPEG
        context.colorspace = Colorspace.ITU709
        context.color_primaries = ColorPrimaries.BT709
        context.color_trc = ColorTrc.BT709
        audio = None
        if clip.audio is not None:
            audio = container.add_stream("aac", rate=clip.sample_rate, layout="mono")
            audio.bit_rate = AUDIO_BITS
        for index, picture in enumerate(clip.frames):
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24").reformat(
                format="yuv420p",
                dst_colorspace=Colorspace.ITU709,
                dst_color_range=ColorRange.MPEG,
                interpolation=_FINE,
            )
            frame.pts, frame.time_base = index, 1 / rate
            container.mux(video.encode(frame))
        container.mux(video.encode(None))
        if audio is not None and clip.audio is not None and len(clip.audio):
            sound = av.AudioFrame.from_ndarray(np.ascontiguousarray(clip.audio[None]), format="fltp", layout="mono")
            sound.sample_rate, sound.pts, sound.time_base = clip.sample_rate, 0, Fraction(1, clip.sample_rate)
            container.mux(audio.encode(sound))
            container.mux(audio.encode(None))


def _comment(clip: Clip) -> str:
    held = {_MARK: 1, "report": clip.report}
    text = json.dumps(held, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # a file name that is no Unicode
        return json.dumps(held)
    return text


def _x264(width: int, crf: int, preset: str) -> dict[str, str]:
    options = {"crf": str(crf), "preset": preset}
    if crf:
        options["profile"] = "high"  # lossless has a profile of its own
    if width < 128:
        # On rows of fewer than eight blocks x264's vector code of this step reads what it never wrote, and the same
        # frames are encoded differently from run to run.
        options["x264-params"] = "mbtree=0"
    return options


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
                    pictures.append(frame.reformat(format="rgb24", interpolation=_FINE).to_ndarray())
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
    report = held.get("report") if isinstance(held, dict) and _MARK in held else None
    return report if isinstance(report, dict) else None
