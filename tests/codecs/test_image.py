"""The first frame's latents: the stock sample, from the request's generator."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from diptych.codecs.image import encode_image, image_tensor
from diptych.media.images import fit_image

SIZE = (48, 32)


@pytest.fixture(scope="module")
def photo():
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8))


def encode(pipeline, photo, seed=3, noise_dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return encode_image(pipeline.vae, image_tensor(fit_image(photo, *SIZE)), generator, noise_dtype), generator


@torch.no_grad()
def stock(pipeline, photo, seed=3):
    generator = torch.Generator().manual_seed(seed)
    width, height = SIZE
    return pipeline.encode_image(photo, height, width, "cpu", torch.float32, generator=generator), generator


def test_the_tensor_is_diffusers(pipeline, photo):
    want = pipeline.video_processor.preprocess(photo, height=SIZE[1], width=SIZE[0], resize_mode="crop")
    assert torch.equal(image_tensor(fit_image(photo, *SIZE)), want)


def test_latents_are_the_stock_sample_and_leave_the_generator_where_stock_does(pipeline, photo):
    got, ours = encode(pipeline, photo)
    want, theirs = stock(pipeline, photo)
    assert got.shape == (1, SIZE[1] // 8, SIZE[0] // 8, 16)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    assert torch.equal(ours.get_state(), theirs.get_state()), "the clip's own noise comes next"


def test_another_seed_is_another_sample(pipeline, photo):
    first, second = encode(pipeline, photo, seed=1)[0], encode(pipeline, photo, seed=2)[0]
    assert not torch.allclose(first, second, atol=1e-3)


@pytest.fixture
def half_vae(pipeline):
    pipeline.vae.to(torch.bfloat16)
    yield pipeline
    pipeline.vae.to(torch.float32)


def test_noise_of_the_vaes_dtype_gives_the_stock_sample_in_half_precision(half_vae, photo):
    got, ours = encode(half_vae, photo, noise_dtype=torch.bfloat16)
    want, theirs = stock(half_vae, photo)
    assert torch.equal(got, want)
    assert torch.equal(ours.get_state(), theirs.get_state())


def test_the_dtype_of_the_vae_does_not_change_the_noise(half_vae, photo):
    """float32 noise on a half-precision mean and width, and a generator that stands where it stands in float32."""
    pixels = image_tensor(fit_image(photo, *SIZE))
    drawn, state = encode(half_vae, photo)
    posterior = half_vae.vae.encode(pixels.to(torch.bfloat16).unsqueeze(2)).latent_dist
    noise = torch.randn(posterior.mean.shape, generator=torch.Generator().manual_seed(3))
    want = (posterior.mean + posterior.std * noise) * half_vae.vae.config.scaling_factor
    assert torch.equal(drawn, want[:, :, 0].permute(0, 2, 3, 1).float())
    half_vae.vae.to(torch.float32)
    assert torch.equal(state.get_state(), encode(half_vae, photo)[1].get_state())


def test_tiling_switched_on_elsewhere_does_not_reach_the_first_frame(pipeline):
    photo = Image.fromarray(np.random.default_rng(1).integers(0, 256, (32, 288, 3), dtype=np.uint8))
    pixels = image_tensor(photo)
    plain = encode_image(pipeline.vae, pixels, torch.Generator().manual_seed(0))
    pipeline.vae.enable_tiling()
    tiled = encode_image(pipeline.vae, pixels, torch.Generator().manual_seed(0))
    pipeline.vae.use_tiling = False
    assert torch.equal(plain, tiled)
