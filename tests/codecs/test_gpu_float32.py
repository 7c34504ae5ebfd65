"""On a GPU the float32 codecs give what a CPU gives, and not what TF32 does."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from diptych.codecs import float32, image, video
from diptych.codecs.float32 import full_float32
from diptych.codecs.image import image_moments
from diptych.codecs.tiles import plan_tiles
from diptych.codecs.video import decode_tile

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu

LIMIT = 5e-5
"""Of the relative difference. A sum in float32 rounds to 2^-24 of it at a time: on a CPU these modules were off by 1e-6
to 3e-6 of float64. TF32 rounds every factor to 2^-11 of it: with factors so rounded they were off by 6e-4 to 2e-3. The
limit lies between, far from both."""


@pytest.fixture(scope="module")
def modules():
    """At the released widths, random: audio VAE, vocoder, video VAE."""
    from diffusers import AutoencoderKLHunyuanVideo, MMAudioVAE, MMAudioVocoder

    torch.manual_seed(0)
    made = (MMAudioVAE(), MMAudioVocoder(), AutoencoderKLHunyuanVideo())
    return [module.eval().requires_grad_(False) for module in made]


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def spectrogram(modules, device):
    with float32.full_float32(torch.float32):
        return modules[0].to(device).decode(draw(1, 40, 4).to(device), return_dict=False)[0]


def waveform(modules, device):
    with float32.full_float32(torch.float32):
        return modules[1].to(device)(draw(1, 128, 8).to(device), return_dict=False)[0]


def pixels(modules, device):
    return decode_tile(modules[2].to(device), draw(16, 2, 4, 4), plan_tiles(2, 4, 4).tiles[0])


def moments(modules, device):
    return image_moments(modules[2].to(device), draw(1, 3, 32, 32))


def relative(got, want):
    return float((got.cpu().double() - want.double()).norm() / want.double().norm())


@pytest.mark.parametrize("codec", [spectrogram, waveform, pixels, moments], ids=lambda codec: codec.__name__)
def test_float32_is_float32(modules, codec, monkeypatch):
    want = codec(modules, "cpu")
    assert relative(codec(modules, "cuda"), want) < LIMIT
    for module in (float32, image, video):
        monkeypatch.setattr(module, "full_float32", lambda dtype: nullcontext())
    assert relative(codec(modules, "cuda"), want) > 2 * LIMIT, "as torch runs it when nobody says otherwise"


def test_a_convolution_alone():
    """128 channels of 3 x 3: wide enough for every kernel that cuDNN has."""
    x, weight = draw(1, 128, 32, 32), draw(128, 128, 3, 3)
    truth = torch.conv2d(x.double(), weight.double())
    x, weight = x.cuda(), weight.cuda()
    with full_float32(torch.float32):
        assert relative(torch.conv2d(x, weight), truth) < 5e-6
    assert relative(torch.conv2d(x, weight), truth) > 1e-4
