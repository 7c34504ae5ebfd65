"""A quick picture of unfinished latents: a linear map from latent channels to colours.

The map is a least-squares fit on the checkpoint's own video VAE: colour fields go through its encoder, and each latent
pixel is held against the mean colour of the 8x8 pixels it stands for. It costs seconds once, and is kept in the cache.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

SIDE = 128
PICTURES = 10
LONG_SIDE = 384


def fit(vae: Any, *, seed: int = 0) -> npt.NDArray[np.float32]:
    """The map (C + 1, 3): channels and one constant to red, green and blue in 0..1, from `vae` (diffusers)."""
    targets, latents = [], []
    generator = torch.Generator().manual_seed(seed)
    scale = float(vae.config.scaling_factor)
    for _ in range(PICTURES):
        picture_CYX = _field(generator)
        pixels = (picture_CYX * 2 - 1)[None, :, None].to(vae.device, vae.dtype)
        with torch.inference_mode():
            latent_CYX = vae.encode(pixels).latent_dist.mean[0, :, 0].float().cpu() * scale
        small_CYX = torch.nn.functional.adaptive_avg_pool2d(picture_CYX, latent_CYX.shape[1:])
        latents.append(latent_CYX.flatten(1).T)
        targets.append(small_CYX.flatten(1).T)
    inputs = torch.cat(latents)
    inputs = torch.cat((inputs, torch.ones(len(inputs), 1)), dim=1)
    # A little ridge: channels that say nothing about colour stay near zero instead of cancelling each other.
    gram = inputs.T @ inputs + 1e-3 * len(inputs) * torch.eye(inputs.shape[1])
    weights: npt.NDArray[np.float32] = torch.linalg.solve(gram, inputs.T @ torch.cat(targets)).numpy()
    return weights


def _field(generator: torch.Generator) -> Tensor:
    """A picture of soft coloured shapes (3, SIDE, SIDE) in 0..1: random colours at several scales."""
    total = torch.zeros(3, SIDE, SIDE)
    for cells, strength in ((2, 1.0), (6, 0.7), (16, 0.4)):
        coarse = torch.rand(1, 3, cells, cells, generator=generator) - 0.5
        total += strength * torch.nn.functional.interpolate(coarse, size=(SIDE, SIDE), mode="bilinear")[0]
    return (total + 0.5).clamp(0, 1)


def picture(weights: npt.NDArray[np.float32], latents_CTYX: Tensor) -> bytes:
    """A JPEG of the middle frame of `latents_CTYX`, long side at most 384 pixels."""
    frame_CYX = latents_CTYX[:, latents_CTYX.shape[1] // 2].float().cpu()
    map_ = torch.from_numpy(weights)
    colours_YXC = frame_CYX.permute(1, 2, 0) @ map_[:-1] + map_[-1]
    pixels = (colours_YXC.nan_to_num().clamp(0, 1) * 255).round().to(torch.uint8).numpy()
    image = Image.fromarray(pixels)
    grow = min(8, max(1, LONG_SIDE // max(image.size)))
    image = image.resize((image.width * grow, image.height * grow), Image.Resampling.BICUBIC)
    image.thumbnail((LONG_SIDE, LONG_SIDE))
    out = io.BytesIO()
    image.save(out, "JPEG", quality=70)
    return out.getvalue()


def picture_for(folder: Path, cache: Path) -> Callable[[Tensor], bytes]:
    """The picture maker of the VAE in `folder` (a checkpoint's `vae`), fitted once and kept in `cache`."""
    cache.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(_fingerprint(folder).encode()).hexdigest()[:24]
    kept = cache / f"preview-{name}.npy"
    if kept.exists():
        weights = np.load(kept, allow_pickle=False)
    else:
        from diffusers import AutoencoderKLHunyuanVideo

        weights = fit(AutoencoderKLHunyuanVideo.from_pretrained(folder, local_files_only=True))
        beside = kept.with_suffix(f".{id(weights)}.npy")
        np.save(beside, weights)
        beside.replace(kept)
    return lambda latents_CTYX: picture(weights, latents_CTYX)


def _fingerprint(folder: Path) -> str:
    """Tells one VAE from another without reading its weights: the config, and names and sizes of the files."""
    files = sorted((f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in folder.iterdir() if f.is_file())
    config = folder / "config.json"
    return repr((str(folder.resolve()), files, config.read_text("utf-8") if config.exists() else ""))
