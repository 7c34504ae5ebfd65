"""A clip: what it is, that it is sound, and how a notebook shows it."""

from __future__ import annotations

import base64
from dataclasses import replace

import numpy as np
import pytest

from diptych.errors import ClipError, UserError
from diptych.media.clip import FLAT, SILENCE, Clip
from diptych.media.mp4 import read_clip
from diptych.request import ClipDefaults, ClipRequest


def asked(**fields):
    return ClipRequest("x", **({"width": 96, "height": 64, "frames": 25} | fields)).resolve(ClipDefaults())


def test_a_good_clip_passes(clip):
    clip.check()
    clip.check(asked())


def test_a_clip_says_what_it_is(clip):
    assert repr(clip) == "Clip(25 frames of 96x64 at 24 fps, sound at 44100 Hz)"
    assert repr(replace(clip, audio=None)) == "Clip(25 frames of 96x64 at 24 fps, no sound)"
    assert (clip.width, clip.height, clip.seconds) == (96, 64, 25 / 24)


def sound(clip, change):
    audio = clip.audio.copy()
    change(audio)
    return replace(clip, audio=audio)


BROKEN = {
    "no frames": lambda c: replace(c, frames=c.frames[:0]),
    "picture is flat.*near 0 of 255": lambda c: replace(c, frames=c.frames * 0),
    "picture is flat.*near 90 of 255": lambda c: replace(c, frames=np.full_like(c.frames, 90)),
    "not finite": lambda c: sound(c, lambda a: a.__setitem__(100, np.nan)),
    "sound is not finite": lambda c: sound(c, lambda a: a.__setitem__(100, np.inf)),
    "silent.*peak is 0": lambda c: sound(c, lambda a: a.fill(0)),
    "silent": lambda c: replace(c, audio=c.audio * SILENCE),
    "sound lasts 1.992 s and the picture 1.042 s": lambda c: replace(c, audio=np.pad(c.audio, (0, 41_900))),
    "sound lasts 0.000 s": lambda c: replace(c, audio=c.audio[:0]),
}


@pytest.mark.parametrize("words", BROKEN)
def test_a_broken_clip_is_named(clip, words):
    with pytest.raises(ClipError, match=words):
        BROKEN[words](clip).check()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"width": 112}, "width 96, but 112 was asked for"),
        ({"height": 80}, "height 64, but 80 was asked for"),
        ({"frames": 29}, "frames 25, but 29 was asked for"),
        ({"fps": 25}, "fps 24, but 25 was asked for"),
        ({"audio": False}, "has sound, but none was asked for"),
    ],
)
def test_a_clip_that_was_not_asked_for_is_named(clip, fields, words):
    with pytest.raises(ClipError, match=words):
        clip.check(asked(**fields))


@pytest.mark.parametrize(
    ("prompt", "allowed"),
    [
        ("A red star stands still in silence.", True),
        ("a red star spins silently", True),
        ("Snow falls without a sound", True),
        ("no sound, no colour", True),
        ("a red star hums, without any hurry", False),
        ("a soundproof room", False),
    ],
)
def test_silence_passes_only_where_the_prompt_asks_for_it(clip, prompt, allowed):
    silent = replace(clip, audio=clip.audio * SILENCE)
    request = replace(asked(), request=replace(asked().request, prompt=prompt))
    if allowed:
        silent.check(request)
    else:
        with pytest.raises(ClipError, match="silent"):
            silent.check(request)


def test_missing_sound_is_named_only_when_it_was_asked_for(clip):
    mute = replace(clip, audio=None)
    mute.check(asked(audio=False))
    mute.check()
    with pytest.raises(ClipError, match="no sound, but sound was asked for"):
        mute.check(asked())


def test_the_thresholds_are_where_they_are_said_to_be(clip):
    half = np.zeros_like(clip.frames)
    half[:, :, ::2] = 1  # standard deviation 0.5
    with pytest.raises(ClipError, match="flat"):
        replace(clip, frames=half).check()
    replace(clip, frames=half * 3).check()  # standard deviation 1.5
    assert FLAT == 1
    replace(clip, audio=np.full_like(clip.audio, 1.01 * SILENCE)).check()


def test_a_check_holds_no_second_copy_of_the_clip(make_clip):
    import tracemalloc

    clip = make_clip(frames=40, width=320, height=192)
    tracemalloc.start()
    clip.check()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < clip.frames.nbytes


def test_a_failed_check_is_an_error_users_can_read(clip):
    assert issubclass(ClipError, UserError)


def test_sound_may_end_within_one_frame_of_the_picture(clip):
    replace(clip, audio=clip.audio[:-1800]).check()
    with pytest.raises(ClipError, match="lasts"):
        replace(clip, audio=clip.audio[:-1900]).check()


def test_arrays_of_another_kind_are_a_fault_of_the_program(clip):
    with pytest.raises(AssertionError):
        Clip(clip.frames.astype(np.float32), None, 24.0)
    with pytest.raises(AssertionError):
        Clip(clip.frames, clip.audio[None], 24.0)


def test_save_and_notebook_hold_the_same_video(clip, tmp_path):
    path = clip.save(tmp_path / "clip.mp4")
    assert len(read_clip(path).frames) == 25
    html = clip._repr_html_()
    assert html.startswith("<video controls")
    data = base64.b64decode(html.split("base64,")[1].split('"')[0])
    assert data == path.read_bytes()
    assert 'width="96" height="64"' in html
    assert " muted" in replace(clip, audio=None)._repr_html_()
