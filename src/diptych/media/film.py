"""A clip on its way into an MP4: the picture is encoded while it is still being made, the file written at the end."""

from __future__ import annotations

import json
from concurrent.futures import Future, ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import av
import numpy as np
import numpy.typing as npt
from av.codec.context import Flags
from av.video.reformatter import ColorPrimaries, ColorRange, Colorspace, ColorTrc, Interpolation

from diptych.errors import MediaError
from diptych.media.clip import Clip
from diptych.media.files import replacing

CRF = 17
"""x264's constant rate factor: here the eye sees no difference from the frames."""
PRESET = "medium"
AUDIO_BITS = 160_000
"""Bits a second of the AAC track; mono."""
MARK = "diptych-clip"
"""What the comment of a file from Diptych holds beside its report."""
FINE = Interpolation.BICUBIC | Interpolation.ACCURATE_RND | Interpolation.FULL_CHR_H_INT | Interpolation.FULL_CHR_H_INP


class Film:
    """H.264 High, yuv420p with BT.709 tags, of frames that are `add`ed in order; `save`, called once, adds the rest.

    Encoding runs on a thread of its own and keeps what it made in memory: until `save` there is no file. A film whose
    `with` block ends unsaved encodes no further than the picture that it has begun.
    """

    def __init__(self, fps: float, *, crf: int = CRF, preset: str = PRESET) -> None:
        """crf: x264's constant rate factor, 0 (lossless) to 51. preset: x264's, `ultrafast` to `veryslow`."""
        self._rate, self._crf, self._preset = exact_rate(fps), crf, preset
        self._thread = ThreadPoolExecutor(1, "film")
        self._parts: list[Future[list[av.Packet]]] = []
        self._encoder: Any = None
        self._count = 0
        self._over = self._ended = False

    def add(self, frames_THWC: npt.NDArray[np.uint8]) -> None:
        """Hand over the next frames, uint8, which stay as they are until they are encoded. Returns at once; what goes
        wrong is told by `save`.
        """
        self._parts.append(self._thread.submit(self._encode, frames_THWC))

    def save(self, path: str | Path, clip: Clip) -> Path:
        """Write `clip`, whose frames were added, to `path` as MP4 with its index in front, whole or not at all.

        Every frame is kept, at the exact rate of `exact_rate`; AAC mono at the clip's sample rate begins with the
        picture and ends at its own last sample. The report stands in the comment. Returns the path.
        Raises `MediaError` when the file cannot be written.
        """
        with replacing(path) as temporary:
            try:
                end = self._thread.submit(self._flush)
                packets = [packet for part in (*self._parts, end) for packet in part.result()]
                shown = (self._count, self._encoder.height, self._encoder.width, 3)
                assert shown == clip.frames.shape and self._rate == exact_rate(clip.fps), "the film is of another clip"
                self._mux(temporary, clip, packets)
            except av.FFmpegError as error:
                if isinstance(error, OSError):
                    raise
                raise MediaError(f"cannot write {path}: the encoder refused the clip ({error.strerror}).") from error
        return Path(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over = True
        self._thread.shutdown(cancel_futures=True)

    def _encode(self, frames_THWC: npt.NDArray[np.uint8]) -> list[av.Packet]:
        packets: list[av.Packet] = []
        if self._encoder is None:
            height, width = frames_THWC.shape[1:3]
            if width % 2 or height % 2:
                raise MediaError(f"a clip of {width}x{height} cannot be written: both sides must be even.")
            self._encoder = av.CodecContext.create("libx264", "w")
            self._encoder.framerate, self._encoder.time_base = self._rate, 1 / self._rate
            self._encoder.flags |= Flags.global_header  # as a stream of an MP4 has it
            self._prepare(self._encoder, width, height)
        for picture in frames_THWC:
            if self._over:
                break
            assert picture.shape == (self._encoder.height, self._encoder.width, 3), "frames of one size"
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24").reformat(
                format="yuv420p",
                dst_colorspace=Colorspace.ITU709,
                dst_color_range=ColorRange.MPEG,
                interpolation=FINE,
            )
            frame.pts, frame.time_base = self._count, 1 / self._rate
            self._count += 1
            packets.extend(self._encoder.encode(frame))
        return packets

    def _flush(self) -> list[av.Packet]:
        assert self._encoder is not None and not self._ended, "a film has frames, and is saved once"
        self._ended = True
        packets: list[av.Packet] = self._encoder.encode(None)
        return packets

    def _prepare(self, context: Any, width: int, height: int) -> None:
        context.width, context.height, context.pix_fmt = width, height, "yuv420p"
        context.options = _x264(width, self._crf, self._preset)
        context.color_range = ColorRange.MPEG
        context.colorspace = Colorspace.ITU709
        context.color_primaries = ColorPrimaries.BT709
        context.color_trc = ColorTrc.BT709

    def _mux(self, path: Path, clip: Clip, packets: list[av.Packet]) -> None:
        # Times in samples, not milliseconds, so that the end of the sound is not rounded.
        options = {"movflags": "+faststart", "movie_timescale": str(clip.sample_rate)}
        with av.open(str(path), "w", format="mp4", options=options) as container:
            container.metadata["comment"] = _comment(clip)
            video = container.add_stream("libx264", rate=self._rate)
            self._prepare(video.codec_context, clip.width, clip.height)  # opened for its header only
            audio = None
            if clip.audio is not None:
                audio = container.add_stream("aac", rate=clip.sample_rate, layout="mono")
                audio.bit_rate = AUDIO_BITS
            for packet in packets:
                packet.stream = video
                container.mux(packet)
            if audio is not None and clip.audio is not None and len(clip.audio):
                sound = av.AudioFrame.from_ndarray(np.ascontiguousarray(clip.audio[None]), format="fltp", layout="mono")
                sound.sample_rate, sound.pts, sound.time_base = clip.sample_rate, 0, Fraction(1, clip.sample_rate)
                container.mux(audio.encode(sound))
                container.mux(audio.encode(None))


def exact_rate(fps: float) -> Fraction:
    """Frames a second as a fraction: 24 -> 24, 12.5 -> 25/2, and 23.976, 29.97, 59.94 -> 24000, 30000, 60000 / 1001."""
    film = Fraction(round(fps * 1.001) * 1000, 1001)
    if abs(film - Fraction(fps)) < Fraction(fps) / 100_000:
        return film
    return Fraction(fps).limit_denominator(10_000)


def _comment(clip: Clip) -> str:
    held = {MARK: 1, "report": clip.report}
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
