"""A film: encoded while its frames come in, the same file as if they had come at once, and no file before its end."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from dataclasses import replace
from fractions import Fraction

import av
import numpy as np
import pytest

from diptych.errors import MediaError
from diptych.media.film import FINE, Film
from diptych.media.mp4 import write


def film_of(frames_THWC, parts=(13, 12), fps=24.0, **options):
    """A film that was given `frames_THWC` in parts."""
    film, first = Film(fps, **options), 0
    for count in parts:
        film.add(frames_THWC[first : first + count])
        first += count
    assert first >= len(frames_THWC)
    return film


def on_disk(folder):
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(
    ("size", "options"),
    [
        ({"width": 96, "height": 64}, {}),
        ({"width": 128, "height": 32, "fps": 23.976}, {"crf": 0, "preset": "veryfast"}),
        ({"audio": False}, {"crf": 30}),
    ],
    ids=["default", "lossless", "silent"],
)
def test_frames_that_come_in_parts_make_the_file_of_the_whole_clip(tmp_path, make_clip, size, options):
    clip = make_clip(**size, report={"request": {"prompt": "a square"}})
    whole = write(tmp_path / "whole.mp4", clip, **options).read_bytes()
    for parts in ((13, 12), (1,) * 25):
        with film_of(clip.frames, parts, clip.fps, **options) as film:
            assert film.save(tmp_path / "parts.mp4", clip).read_bytes() == whole


def test_it_is_the_file_that_a_stream_of_the_container_makes(tmp_path, make_clip):
    """The encoder stands alone, so that there need be no file yet; what it makes is that of a stream in one."""
    clip = make_clip(width=128, audio=False, report={"request": {"prompt": "a square"}})
    with film_of(clip.frames) as film:
        data = film.save(tmp_path / "film.mp4", clip).read_bytes()
    options = {"movflags": "+faststart", "movie_timescale": "44100"}
    with av.open(str(tmp_path / "stream.mp4"), "w", format="mp4", options=options) as container:
        container.metadata["comment"] = json.dumps({"diptych-clip": 1, "report": clip.report})
        stream = container.add_stream("libx264", rate=24, options={"crf": "17", "preset": "medium", "profile": "high"})
        stream.width, stream.height, stream.pix_fmt = clip.width, clip.height, "yuv420p"
        context = stream.codec_context
        context.color_range = context.colorspace = context.color_primaries = context.color_trc = 1  # BT.709, limited
        for index, picture in enumerate(clip.frames):
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame = frame.reformat(format="yuv420p", dst_colorspace=1, dst_color_range=1, interpolation=FINE)
            frame.pts, frame.time_base = index, Fraction(1, 24)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    assert (tmp_path / "stream.mp4").read_bytes() == data


def test_frames_are_encoded_without_being_waited_for_and_no_file_is_there_before_the_end(tmp_path, clip):
    given = threading.Event()

    class Late(type(clip.frames)):
        """Frames that can be read only after all have been handed over."""

        def __iter__(self):
            assert given.wait(10)
            return super().__iter__()

    with film_of(clip.frames.view(Late)) as film:
        given.set()
        deadline = time.monotonic() + 10
        while film._count < len(clip.frames) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert film._count == len(clip.frames), "nobody asked for the file yet"
        assert on_disk(tmp_path) == []
        film.save(tmp_path / "clip.mp4", clip)
    assert on_disk(tmp_path) == ["clip.mp4"]


def test_a_film_that_is_given_up_encodes_no_further(tmp_path, make_clip):
    begun, go_on = threading.Event(), threading.Event()
    frames = make_clip().frames

    class Held(type(frames)):
        """Frames of which the fourth is long in coming."""

        def __iter__(self):
            for number, picture in enumerate(np.asarray(self)):
                if number == 3:
                    begun.set()
                    assert go_on.wait(10)
                yield picture

    with suppress(KeyboardInterrupt), film_of(frames.view(Held)) as film:
        assert begun.wait(10)
        threading.Timer(0.2, go_on.set).start()
        raise KeyboardInterrupt
    assert film._count == 3, "neither the rest of the part that was begun nor the other"
    assert not any(thread.name.startswith("film") for thread in threading.enumerate())
    assert on_disk(tmp_path) == []


@pytest.mark.parametrize(
    ("spoil", "options", "why"),
    [
        (lambda frames: frames[:, :31], {}, "both sides must be even"),
        (lambda frames: frames, {"preset": "no such"}, "the encoder refused the clip"),
    ],
    ids=["odd", "encoder"],
)
def test_what_goes_wrong_meanwhile_is_told_by_save_in_one_sentence(tmp_path, clip, spoil, options, why):
    (tmp_path / "clip.mp4").write_bytes(b"what stood here")
    with film_of(spoil(clip.frames), **options) as film, pytest.raises(MediaError, match=why):
        film.save(tmp_path / "clip.mp4", replace(clip, frames=spoil(clip.frames)))
    assert on_disk(tmp_path) == ["clip.mp4"]
    assert (tmp_path / "clip.mp4").read_bytes() == b"what stood here"


@pytest.mark.parametrize(
    "other",
    [
        lambda clip: replace(clip, frames=np.concatenate([clip.frames, clip.frames])),
        lambda clip: replace(clip, frames=clip.frames[:, ::2]),
        lambda clip: replace(clip, fps=clip.fps / 2),
    ],
    ids=["frames", "size", "rate"],
)
def test_a_film_of_another_clip_is_not_saved(tmp_path, clip, other):
    with film_of(clip.frames) as film, pytest.raises(AssertionError, match="another clip"):
        film.save(tmp_path / "clip.mp4", other(clip))
    assert on_disk(tmp_path) == []


def test_frames_of_another_size_are_not_scaled_into_the_film(tmp_path, clip):
    with film_of(clip.frames[:13], (13,)) as film:
        film.add(clip.frames[13:, ::2])
        with pytest.raises(AssertionError, match="one size"):
            film.save(tmp_path / "clip.mp4", clip)
    assert on_disk(tmp_path) == []


def test_a_film_has_frames_and_is_saved_once(tmp_path, clip):
    with Film(clip.fps) as film, pytest.raises(AssertionError, match="has frames"):
        film.save(tmp_path / "clip.mp4", clip)
    assert on_disk(tmp_path) == []
    with film_of(clip.frames) as film:
        film.save(tmp_path / "clip.mp4", clip)
        with pytest.raises(AssertionError, match="saved once"):
            film.save(tmp_path / "again.mp4", clip)
    assert on_disk(tmp_path) == ["clip.mp4"]
