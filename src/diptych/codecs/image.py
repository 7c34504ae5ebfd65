"""The first frame: an image to the latents that a clip begins with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from PIL.Image import Image
from torch import Tensor


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
    pixels = image_B3HW.to(device=vae.device, dtype=vae.dtype).unsqueeze(2)
    posterior = DiagonalGaussianDistribution(vae.quant_conv(vae.encoder(pixels)))
    noise = torch.randn(posterior.mean.shape, generator=generator, dtype=noise_dtype).to(posterior.mean.device)
    latents_BCTYX = (posterior.mean + posterior.std * noise) * vae.config.scaling_factor
    latents_BYXC: Tensor = latents_BCTYX[:, :, 0].permute(0, 2, 3, 1).float()
    return latents_BYXC
