"""Every field of a request: what is accepted, and one sentence for what is not."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest

from diptych.errors import MissingError, RequestError
from diptych.request import ClipDefaults, ClipRequest, audio_latents, changed, frames_for

BASE = ClipDefaults()
DISTILLED = ClipDefaults(steps=10, guidance=1.0, distilled=True)

REFUSED = {
    "width that is no multiple of 16": ({"width": 100}, "width = 100", "96 or 112"),
    "height that is no multiple of 16": ({"height": 481}, "height = 481", "480 or 496"),
    "width of zero": ({"width": 0}, "width = 0", "from 16 to 2048"),
    "negative height": ({"height": -16}, "height = -16", "from 16 to 2048"),
    "beyond the rotary table": ({"width": 2064}, "width = 2064", "from 16 to 2048"),
    "width as text": ({"width": "864"}, "width = '864'", "a whole number"),
    "width as a fraction": ({"width": 864.0}, "width = 864.0", "a whole number"),
    "width as a truth": ({"width": True}, "width = True", "a whole number"),
    "no frames": ({"frames": 0}, "frames = 0", "from 1 to 509"),
    "too many frames": ({"frames": 510}, "frames = 510", "from 1 to 509"),
    "no steps": ({"steps": 0}, "steps = 0", "from 1 to 1000"),
    "too many steps": ({"steps": 1001}, "steps = 1001", "from 1 to 1000"),
    "negative seed": ({"seed": -1}, "seed = -1", "a whole number from 0"),
    "seed beyond 63 bits": ({"seed": 2**63}, "seed = 9223372036854775808", "a whole number from 0"),
    "guidance that is no number": ({"guidance": float("nan")}, "guidance = nan", "from 0 to 100"),
    "infinite guidance": ({"guidance": float("inf")}, "guidance = inf", "from 0 to 100"),
    "negative guidance": ({"guidance": -1.0}, "guidance = -1.0", "from 0 to 100"),
    "guidance as text": ({"guidance": "5"}, "guidance = '5'", "from 0 to 100"),
    "rate of zero": ({"fps": 0}, "fps = 0", "from 1 to 240"),
    "rate that is no number": ({"fps": float("nan")}, "fps = nan", "from 1 to 240"),
    "no length": ({"seconds": 0}, "seconds = 0", "from 0.01 to 509"),
    "a length that is no number": ({"seconds": float("nan")}, "seconds = nan", "from 0.01 to 509"),
    "two lengths": ({"seconds": 2, "frames": 9}, "seconds = 2", "either seconds or frames, not both"),
    "unknown fit": ({"fit": "fill"}, "fit = 'fill'", "crop, pad, stretch"),
    "unknown level": ({"audio_level": "loud"}, "audio_level = 'loud'", "clip, normalize"),
    "unknown grid": ({"sigma_grid": "karras"}, "sigma_grid = 'karras'", "diffusers, native"),
    "unknown noise": ({"noise_dtype": "float64"}, "noise_dtype = 'float64'", "float32, bfloat16, float16"),
    "sound as text": ({"audio": "yes"}, "audio = 'yes'", "true or false"),
    "too many text tokens": ({"max_text_tokens": 1025}, "max_text_tokens = 1025", "from 1 to 1024"),
    "empty prompt": ({"prompt": ""}, "prompt = ''", "say in words"),
    "blank prompt": ({"prompt": " \n\t"}, "prompt", "say in words"),
    "prompt that is no text": ({"prompt": 7}, "prompt = 7", "a text"),
    "enormous prompt": ({"prompt": "x" * 32_001}, "prompt", "at most 32000 characters; this one has 32001"),
    "prompt with NUL": ({"prompt": "a\x00b"}, "prompt", "without NUL"),
    "prompt that is no Unicode": ({"prompt": "\ud800"}, "prompt", "UTF-8"),
    "no limit of text tokens": ({"max_text_tokens": None}, "max_text_tokens = None", "from 1 to 1024"),
    "image as a number": ({"image": 5}, "image = 5", "a path, the bytes of an image file, or a PIL image"),
    "image as a list": ({"image": ["a.png"]}, "image = ['a.png']", "a path, the bytes"),
    "image as an array": ({"image": np.zeros((2, 2, 3))}, "image = array", "a path, the bytes"),
    "image path with NUL": ({"image": "a\x00b"}, "image", "a path without NUL"),
    "image path that is no Unicode": ({"image": Path("\udcff.png")}, "image", "UTF-8"),
    "enormous negative": ({"negative": "x" * 32_001}, "negative", "at most 32000"),
}


@pytest.mark.parametrize(("values", "field", "accepted"), REFUSED.values(), ids=REFUSED.keys())
def test_refused_with_one_sentence(values, field, accepted):
    with pytest.raises(RequestError) as caught:
        ClipRequest(**({"prompt": "x"} | values))
    sentence = str(caught.value)
    assert field in sentence
    assert accepted in sentence
    assert len(sentence) < 300
    assert "\n" not in sentence


def test_numbers_of_numpy_are_numbers():
    request = ClipRequest(
        "x", width=np.int64(48), seed=np.uint32(7), fps=np.float32(12.5), guidance=np.float16(2), audio=np.True_
    )
    assert request == ClipRequest("x", width=48, seed=7, fps=12.5, guidance=2.0)
    assert json.loads(json.dumps(request.to_dict()))["seed"] == 7
    with pytest.raises(RequestError, match="width = 50 is not accepted"):
        ClipRequest("x", width=np.uint8(50))


@pytest.mark.parametrize("values", [None, "x", ["prompt"], {1: 2}], ids=repr)
def test_what_is_no_object_is_no_request(values):
    with pytest.raises(RequestError):
        ClipRequest.from_dict(values)


def test_open_fields_come_from_the_checkpoint():
    resolved = ClipRequest("x").resolve(BASE)
    assert (resolved.width, resolved.height, resolved.frames, resolved.fps) == (864, 480, 121, 24.0)
    assert (resolved.T, resolved.Y, resolved.X, resolved.A) == (31, 60, 108, 218)
    assert (resolved.steps, resolved.guidance, resolved.guided) == (50, 5.0, True)
    assert ClipRequest("x", frames=125).resolve(BASE).A == 225


@pytest.mark.parametrize(
    ("asked", "made"), [(119, 117), (120, 121), (122, 121), (123, 121), (1, 1), (2, 1), (124, 125)]
)
def test_frames_are_rounded_as_diffusers_does_and_said_so(asked, made):
    resolved = ClipRequest("x", frames=asked).resolve(BASE)
    assert resolved.frames == made
    assert asked == made or f"from {asked} to {made}" in resolved.notes[0]
    assert (asked == made) == (not resolved.notes)


@pytest.mark.parametrize("guidance", [5.0, 0.0, 1.0001])
def test_a_distilled_checkpoint_takes_no_guidance(guidance):
    with pytest.raises(RequestError, match="takes only 1"):
        ClipRequest("x", guidance=guidance).resolve(DISTILLED)
    assert ClipRequest("x").resolve(DISTILLED).guidance == 1.0


def test_what_a_checkpoint_cannot_do_is_refused():
    with pytest.raises(RequestError, match="makes no sound"):
        ClipRequest("x").resolve(ClipDefaults(has_audio=False))
    with pytest.raises(RequestError, match="takes no image"):
        ClipRequest("x", image="a.png").resolve(ClipDefaults(has_image=False))
    with pytest.raises(RequestError, match=r"sound of at most 47\.6 s"):
        ClipRequest("x", frames=509, fps=10).resolve(BASE)
    assert ClipRequest("x", frames=509, fps=10, audio=False).resolve(BASE).A == 0


def test_seconds_give_the_nearest_frames():
    assert [frames_for(s, 24) for s in (5, 1, 0.01, 2.05)] == [121, 25, 1, 49]
    resolved = ClipRequest("x", seconds=2).resolve(BASE)
    assert (resolved.frames, resolved.request.seconds, resolved.notes) == (49, None, ())


def test_seconds_are_counted_at_the_rate_of_the_clip():
    assert ClipRequest("x", seconds=2, fps=12).resolve(BASE).frames == 25
    assert ClipRequest("x", seconds=2).resolve(ClipDefaults(fps=12.0)).frames == 25
    with pytest.raises(RequestError, match=r"seconds = 30 is not accepted: at most 21\.2 s at 24 fps"):
        ClipRequest("x", seconds=30).resolve(BASE)


def test_one_length_takes_the_place_of_the_other():
    assert changed({"prompt": "x", "frames": 9, "fps": 12}, {"seconds": 2}) == {"prompt": "x", "fps": 12, "seconds": 2}
    assert changed({"seconds": 2}, {"frames": 9}) == {"frames": 9}
    assert changed({"frames": 9}, {"fps": 12}) == {"frames": 9, "fps": 12}


def test_audio_lasts_at_least_as_long_as_the_picture():
    for frames in range(1, 510, 4):
        for fps in (1, 12.5, 23.976, 24, 30, 60):
            latents = audio_latents(frames, fps)
            assert latents * 1024 / 44_100 >= frames / fps > (latents - 1) * 1024 / 44_100


def test_json_and_back():
    request = ClipRequest("Grüße", width=64, seed=3, fps=23.976, image="a.png")
    assert ClipRequest.from_dict(request.to_dict()) == request
    with pytest.raises(RequestError, match="did you mean guidance"):
        ClipRequest.from_dict({"prompt": "x", "guidence": 3})
    with pytest.raises(RequestError, match=r"^prompt is missing: say in words"):
        ClipRequest.from_dict({})


def test_errors_cross_processes():
    error = RequestError("width", 100, "a multiple of 16")
    copy = pickle.loads(pickle.dumps(error))
    assert str(copy) == str(error)
    assert (copy.field, copy.value, copy.accepted) == ("width", 100, "a multiple of 16")
    missing = pickle.loads(pickle.dumps(MissingError("prompt", "say something")))
    assert (type(missing), str(missing)) == (MissingError, "prompt is missing: say something.")
