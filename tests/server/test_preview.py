"""The latent-to-RGB fit: exact where latents are linear in colours, cached, and of a sensible size."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from diptych.server.running import preview


class LinearVae:
    """Latents that are a linear function of the mean colour of 8x8 pixels, in 16 channels."""

    config = SimpleNamespace(scaling_factor=0.476986)
    device, dtype = "cpu", torch.float32

    def __init__(self) -> None:
        self.mix = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
        self.shift = torch.randn(16, 1, 1, 1, generator=torch.Generator().manual_seed(2))

    def encode(self, pixels_BCTHW: Tensor) -> Any:
        small = torch.nn.functional.avg_pool3d(pixels_BCTHW, (1, 8, 8))
        mean = torch.einsum("oc,bcthw->bothw", self.mix, small) + self.shift
        return SimpleNamespace(latent_dist=SimpleNamespace(mean=mean))


def test_the_fit_finds_the_colours_again() -> None:
    vae = LinearVae()
    weights = preview.fit(vae)
    assert weights.shape == (17, 3)
    colours = torch.tensor([0.9, 0.2, 0.5])
    pixels = (colours * 2 - 1)[None, :, None, None, None].expand(1, 3, 1, 64, 96)
    latents_CTYX = vae.encode(pixels).latent_dist.mean[0] * vae.config.scaling_factor
    image = Image.open(io.BytesIO(preview.picture(weights, latents_CTYX)))
    assert image.size == (96, 64)
    assert np.asarray(image).mean(axis=(0, 1)) / 255 == pytest.approx(colours.numpy(), abs=0.03)


def test_a_picture_shows_the_middle_frame_and_survives_bad_numbers() -> None:
    weights = np.zeros((17, 3), np.float32)
    weights[0] = 1.0
    latents_CTYX = torch.zeros(16, 3, 8, 8)
    latents_CTYX[0, 1] = 1.0
    bright = np.asarray(Image.open(io.BytesIO(preview.picture(weights, latents_CTYX))))
    assert bright.mean() > 250
    latents_CTYX[:] = torch.nan
    dark = np.asarray(Image.open(io.BytesIO(preview.picture(weights, latents_CTYX))))
    assert dark.mean() < 5


def test_a_large_clip_gives_a_small_picture() -> None:
    data = preview.picture(np.zeros((17, 3), np.float32), torch.zeros(16, 2, 128, 256))
    assert max(Image.open(io.BytesIO(data)).size) <= 384


def test_the_fit_is_made_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import diffusers

    calls = []

    def load(*_: Any, **__: Any) -> LinearVae:
        calls.append(1)
        return LinearVae()

    monkeypatch.setattr(diffusers.AutoencoderKLHunyuanVideo, "from_pretrained", load)
    folder = tmp_path / "vae"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    latents_CTYX = torch.randn(16, 1, 4, 4)
    first = preview.picture_for(folder, tmp_path / "cache")(latents_CTYX)
    second = preview.picture_for(folder, tmp_path / "cache")(latents_CTYX)
    assert first == second
    assert len(calls) == 1
    (folder / "config.json").write_text('{"other": 1}')
    preview.picture_for(folder, tmp_path / "cache")
    assert len(calls) == 2, "another VAE has another fit"
