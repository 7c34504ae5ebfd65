"""The two panels while they are denoised, and the noise they start from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from diptych.request import NoiseDtype, ResolvedRequest


class Latents(NamedTuple):
    """video (B, T, Y, X, C) and audio (B, A, C) or None; float32."""

    video: Tensor
    audio: Tensor | None

    def to(self, device: torch.device) -> Latents:
        return Latents(self.video.to(device), None if self.audio is None else self.audio.to(device))


def draw_noise(
    requests: Sequence[ResolvedRequest],
    generators: Sequence[Generator],
    video_channels: int,
    audio_channels: int,
) -> Latents:
    """Starting noise of a batch: one CPU generator a clip, video before audio, as diffusers' pipeline draws it.

    The same on every machine, device, rank count and precision. A generator that has already drawn the posterior
    noise of a reference image goes on from there.
    """
    video, audio = [], []
    for request, generator in zip(requests, generators, strict=True):
        assert generator.device.type == "cpu", "noise is drawn on the CPU"
        dtype: NoiseDtype = request.request.noise_dtype
        kind = getattr(torch, dtype)
        shape = (request.T, request.Y, request.X, video_channels)
        video.append(torch.randn(shape, generator=generator, dtype=kind).float())
        if request.A:
            shape_a = (request.A, audio_channels)
            audio.append(torch.randn(shape_a, generator=generator, dtype=kind).float())
    return Latents(torch.stack(video), torch.stack(audio) if audio else None)
