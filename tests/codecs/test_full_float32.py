"""float32 codecs are float32: no convolution of theirs may use TF32, and no flag of the process is touched for it."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from diptych.codecs import audio, image, video
from diptych.codecs.audio import decode_audio
from diptych.codecs.float32 import FullFloat32, full_float32
from diptych.codecs.image import image_moments
from diptych.codecs.tiles import plan_tiles
from diptych.codecs.video import decode_video

TOLD = "aten._convolution.default"
"""The convolution whose last arguments are flags: benchmark, deterministic, cuDNN, TF32."""
UNTOLD = "aten.convolution.default"
"""The one that asks the flags of the process."""


class Watching(TorchDispatchMode):
    """Keeps the convolutions of this thread, behind whatever `with` stands inside its own: name and arguments."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "convolution" in str(func):
            self.seen.append((str(func), args))
        return func(*args, **(kwargs or {}))

    @property
    def names(self):
        return {name for name, _ in self.seen}


def convolve(dtype=torch.float32):
    return F.conv1d(torch.ones(1, 2, 9, dtype=dtype), torch.ones(3, 2, 3, dtype=dtype))


def sound(pipeline):
    latents = torch.randn((1, 40, 2), generator=torch.Generator().manual_seed(0))
    return decode_audio(pipeline.audio_vae, pipeline.vocoder, latents, 2048)


def picture(pipeline):
    latents = torch.randn((1, 16, 2, 4, 4), generator=torch.Generator().manual_seed(0))
    return decode_video(pipeline.vae, latents, plan_tiles(2, 4, 4))


def first_frame(pipeline):
    return image_moments(pipeline.vae, torch.zeros(1, 3, 32, 32)).numpy()


CODECS = {"sound": sound, "picture": picture, "first frame": first_frame}
codecs = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)


@codecs
def test_every_convolution_is_told_to_leave_tf32(pipeline, codec):
    with Watching() as watching:
        codec(pipeline)
    assert watching.names == {TOLD}
    assert all(args[-1] is False for _, args in watching.seen)
    assert len(watching.seen) > 5


@codecs
def test_it_changes_no_bit_where_there_is_no_tf32(pipeline, codec, monkeypatch):
    told = codec(pipeline)
    for module in (audio, image, video):
        monkeypatch.setattr(module, "full_float32", lambda dtype: nullcontext())
    assert np.array_equal(told, codec(pipeline))


@pytest.mark.parametrize("convolution", [F.conv1d, F.conv2d, F.conv3d], ids=lambda f: f.__name__)
@pytest.mark.parametrize("transposed", [False, True])
def test_every_kind_of_convolution(convolution, transposed):
    axes = int(convolution.__name__[4])
    x, weight, bias = torch.randn(2, 4, *[7] * axes), torch.randn(4, 2, *[3] * axes), torch.randn(4)
    if transposed:
        convolution = getattr(F, f"conv_transpose{axes}d")
    more = {"stride": 2, "padding": 1, "groups": 2}
    want = convolution(x, weight, bias, **more)
    with Watching() as watching, FullFloat32():
        assert torch.equal(convolution(x, weight, bias, **more), want)
    assert [name for name, _ in watching.seen] == [TOLD]


def test_flags_of_the_process_are_read_and_left_alone(pipeline):
    """TF32 aside: whether to try kernels, to repeat bits, to use cuDNN at all is for whoever owns the process."""
    flags = torch.backends.cudnn
    before = (flags.allow_tf32, flags.conv.fp32_precision, torch.backends.cuda.matmul.allow_tf32)
    assert before[0] and not before[2], "torch's defaults, with which we run"
    inside = []
    hook = pipeline.vocoder.register_forward_pre_hook(
        lambda module, args: inside.append(
            (flags.allow_tf32, flags.conv.fp32_precision, torch.backends.cuda.matmul.allow_tf32)
        )
    )
    with flags.flags(enabled=True, benchmark=True, deterministic=True), Watching() as watching:
        sound(pipeline)
    hook.remove()
    assert all(args[-4:] == (True, True, True, False) for _, args in watching.seen)
    now = (flags.allow_tf32, flags.conv.fp32_precision, torch.backends.cuda.matmul.allow_tf32)
    assert inside == [before] and now == before


def test_a_decode_that_fails_leaves_nothing_behind(pipeline):
    def fail(module, args):
        raise RuntimeError("stop")

    hook = pipeline.vocoder.register_forward_pre_hook(fail)
    with Watching() as watching:
        with pytest.raises(RuntimeError, match="stop"):
            sound(pipeline)
        watching.seen.clear()
        convolve()
    hook.remove()
    assert watching.names == {UNTOLD}


def test_threads_do_not_see_each_other():
    """One decodes all the while; what another computes before, meanwhile and after is its own affair."""
    entered, leave = threading.Event(), threading.Event()
    names = {}

    def decoding():
        with Watching() as watching, FullFloat32():
            entered.set()
            assert leave.wait(30)
            convolve()
        names["decoding"] = watching.names

    thread = threading.Thread(target=decoding)
    thread.start()
    assert entered.wait(30)
    with Watching() as watching:
        convolve()
    names["other, meanwhile"] = watching.names
    with Watching() as watching, FullFloat32():
        convolve()
    leave.set()
    thread.join(30)
    names["other, decoding too"] = watching.names
    assert names == {"decoding": {TOLD}, "other, meanwhile": {UNTOLD}, "other, decoding too": {TOLD}}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_needs_none_of_it(dtype):
    with Watching() as watching, full_float32(dtype):
        convolve(dtype)
    assert watching.names == {UNTOLD}
