"""What the transformer's training reads, on the GPU: latents of a pool of clips and features of their captions."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tools.toyworld.fast_vae import encode
from tools.toyworld.render import pictures, sounds
from tools.toyworld.source import Pool
from tools.toyworld.text import NEGATIVE, Encoders

LATENT_FRAMES, ROWS, COLUMNS, AUDIO_LATENTS = 13, 8, 12, 88
VIDEO_CHANNELS, AUDIO_CHANNELS = 16, 40


@dataclass
class Features:
    """Text of N captions: hidden (N, L, D), mask (N, L), pooled (N, P); `negative` is the same for the one text
    that stands for "no caption", with N = 1."""

    hidden: Tensor
    mask: Tensor
    pooled: Tensor

    def rows(self, index: Tensor) -> Features:
        return Features(self.hidden[index], self.mask[index], self.pooled[index])


@dataclass
class Latents:
    """video (N, 13, 8, 12, 16), first and first_spread (N, 8, 12, 16): mean and deviation of the first frame encoded
    alone; audio (N, 88, 40). All scaled to unit deviation by the two factors; bfloat16."""

    video: Tensor
    first: Tensor
    first_spread: Tensor
    audio: Tensor
    video_factor: float
    audio_factor: float


def features(folder: Path, captions: list[str], place: torch.device) -> tuple[Features, Features]:
    """Features of the captions, and of the default negative prompt."""
    encoders = Encoders(folder, place)
    hidden, mask, pooled = encoders(captions)
    none = encoders([NEGATIVE])
    return Features(hidden.bfloat16(), mask, pooled.bfloat16()), Features(
        none[0].bfloat16(), none[1], none[2].bfloat16()
    )


@torch.no_grad()
def video_latents(vae: nn.Module, frames: Tensor) -> Tensor:
    """Means (B, 13, 8, 12, 16) of 49 frames: what the stock module's windowed encode gives (windows of 17 frames every
    12; a later window's first latent is dropped and its second replaced by the last of the window before)."""
    first = encode(vae, torch.cat([frames[:, :, 0:17], frames[:, :, 12:29], frames[:, :, 24:41]]))[0].chunk(3)
    last = encode(vae, frames[:, :, 36:49])[0]
    later = [first[1][:, :, 2:], first[2][:, :, 2:], last[:, :, 2:]]
    return torch.cat([first[0], *later], dim=2).movedim(1, -1)


@torch.no_grad()
def latents(
    video: nn.Module,
    audio: Any,
    pool: Pool,
    place: torch.device,
    seconds: float,
    agree: Callable[..., tuple[float, ...]] = lambda *values: values,
    chunk: int | None = None,
) -> Latents:
    """Encode clips of the pool by both VAEs for at most `seconds`.

    agree: given the two factors that make latents of unit deviation, returns those to use.
    """
    chunk = chunk or (64 if place.type == "cuda" else 4)
    columns: list[tuple[Tensor, ...]] = []
    started = time.monotonic()
    for start in range(0, pool.count - chunk + 1, chunk):
        track = pool.take(torch.arange(start, start + chunk, device=place))
        frames = pictures(track).bfloat16()
        mean, log_variance = encode(video, frames[:, :, :1])
        sound = audio.encode(sounds(track)).latent_dist.mode().movedim(1, -1)
        first, spread = mean[:, :, 0].movedim(1, -1), torch.exp(0.5 * log_variance)[:, :, 0].movedim(1, -1)
        columns.append(tuple(t.bfloat16() for t in (video_latents(video, frames), first, spread, sound)))
        if place.type == "cuda":
            torch.cuda.synchronize()
        if time.monotonic() - started > seconds:
            break
    parts = [torch.cat(column) for column in zip(*columns, strict=True)]
    video_factor, audio_factor = agree(*(1 / float(parts[i][:4096].float().std()) for i in (0, 3)))
    return Latents(*(part * video_factor for part in parts[:3]), parts[3] * audio_factor, video_factor, audio_factor)
