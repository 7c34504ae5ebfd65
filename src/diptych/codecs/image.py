"""The first frame: an image to the latents that a clip begins with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from diptych.codecs.float32 import full_float32
from diptych.codecs.tiles import SPACE


def image_tensor(image: Image) -> Tensor:
    """(1, 3, height, width), float32 in [-1, 1], of an RGB image, with diffusers' order of operations."""
    levels_HWC = np.asarray(image, dtype=np.float32) / 255.0
    return 2.0 * torch.from_numpy(levels_HWC).permute(2, 0, 1)[None] - 1.0


@torch.no_grad()
def encode_image(
    vae: Any, image_B3HW: Tensor, generator: torch.Generator, noise_dtype: torch.dtype = torch.float32
) -> Tensor:
    """First-frame latents (B, Y, X, C), float32, on the VAE's device: a sample of the posterior, scaled.

    vae: diffusers' `AutoencoderKLHunyuanVideo`, which runs in its own dtype, untiled. The noise is drawn by
    `generator`, on the CPU, before any noise of the clip itself and in the same dtype, whatever that of the VAE: so
    precision does not change it. (diffusers draws in the VAE's dtype: with `noise_dtype` equal to it, the same bits.)
    """
    return sample_first_frame(vae, image_moments(vae, image_B3HW), generator, noise_dtype)


@torch.no_grad()
def image_moments(vae: Any, image_B3HW: Tensor) -> Tensor:
    """What the VAE's encoder makes of images: mean and log-variance of the posterior, (B, 2C, 1, Y, X)."""
    pixels = image_B3HW.to(device=vae.device, dtype=vae.dtype).unsqueeze(2)
    with full_float32(vae.dtype):
        moments: Tensor = vae.quant_conv(vae.encoder(pixels))
    return moments


def empty_moments(vae: Any, size: tuple[int, int]) -> Tensor:
    """A tensor that takes the moments of one image of this size (width, height) which another rank has made."""
    width, height = size
    shape = (1, 2 * vae.config.latent_channels, 1, height // SPACE, width // SPACE)
    return torch.empty(shape, dtype=vae.dtype, device=vae.device)


def sample_first_frame(
    vae: Any, moments: Tensor, generator: torch.Generator, noise_dtype: torch.dtype = torch.float32
) -> Tensor:
    """`encode_image`, from the moments on."""
    # Imported here, because all of diffusers' models come along, and that takes seconds.
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

    posterior = DiagonalGaussianDistribution(moments)
    noise = torch.randn(posterior.mean.shape, generator=generator, dtype=noise_dtype).to(posterior.mean.device)
    latents_BCTYX = (posterior.mean + posterior.std * noise) * vae.config.scaling_factor
    latents_BYXC: Tensor = latents_BCTYX[:, :, 0].permute(0, 2, 3, 1).float()
    return latents_BYXC
