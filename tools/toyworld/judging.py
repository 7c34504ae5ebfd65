"""Clips of held-out prompts made in large batches and judged, where an engine would make them one by one."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from diptych.bench.score import Score, judge
from diptych.bench.toyworld import FPS
from diptych.bench.toyworld_captions import score_prompts
from diptych.media.clip import Clip
from tools.toyworld import audio_parts, video_vae
from tools.toyworld.text import NEGATIVE, Encoders


@dataclass
class Parts:
    """Everything between the features of a caption and a clip, on one device."""

    transformer: Any
    vae: Any
    audio_vae: Any
    vocoder: Any
    factors: tuple[float, float]
    place: torch.device

    @classmethod
    def load(
        cls,
        transformer: Any,
        video: Path,
        audio: Path,
        vocoder: Path,
        video_factor: float,
        audio_factor: float,
        place: torch.device,
    ) -> Parts:
        parts = (video_vae.load(video), audio_parts.load_vae(audio), audio_parts.load_vocoder(vocoder))
        return cls(transformer, *(part.to(place) for part in parts), (video_factor, audio_factor), place)


@torch.no_grad()
def denoise(
    parts: Parts,
    cond: tuple[Tensor, Tensor, Tensor],
    none: tuple[Tensor, Tensor, Tensor],
    *,
    guidance: float,
    shift: float,
    steps: int,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Latents of one clip per caption: video (B, T, Y, X, C) and audio (B, A, C), by Euler steps with guidance."""
    B = len(cond[0])
    generator = torch.Generator().manual_seed(seed)
    video = torch.randn(B, 13, 8, 12, 16, generator=generator).to(parts.place)
    audio = torch.randn(B, 88, 40, generator=generator).to(parts.place)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
    scheduler.set_timesteps(steps)
    both = [torch.cat([a, b.expand(B, *b.shape[1:])]) for a, b in zip(cond, none, strict=True)]
    sigmas = scheduler.sigmas.tolist()
    for sigma, after in pairwise(sigmas):
        noisy = torch.cat([video, torch.zeros_like(video), torch.zeros_like(video[..., :1])], dim=-1)
        with torch.autocast(parts.place.type, torch.bfloat16):
            out = parts.transformer(
                hidden_states=noisy.repeat(2, 1, 1, 1, 1),
                encoder_hidden_states=both[0],
                pooled_projections=both[2],
                timestep=torch.full((2 * B,), 1000 * sigma, device=parts.place),
                audio_hidden_states=audio.repeat(2, 1, 1),
                encoder_attention_mask=both[1],
                return_dict=False,
            )
        (video_v, video_u), (audio_v, audio_u) = (o.float().chunk(2) for o in out)
        video = video + (after - sigma) * (video_u + guidance * (video_v - video_u))
        audio = audio + (after - sigma) * (audio_u + guidance * (audio_v - audio_u))
    return video, audio


@torch.no_grad()
def decode(parts: Parts, video: Tensor, audio: Tensor) -> list[Clip]:
    frames = parts.vae.decode(video.movedim(-1, 1) / parts.factors[0]).sample
    pixels = ((frames.clamp(-1, 1) + 1) * 127.5).round().byte().movedim(1, -1).cpu().numpy()
    mel = parts.audio_vae.decode(audio.movedim(-1, 1) / parts.factors[1]).sample
    waves = parts.vocoder(mel).sample[:, 0].float().cpu().numpy()
    return [Clip(frames=p, audio=w.astype(np.float32), fps=FPS) for p, w in zip(pixels, waves, strict=True)]


def judge_many(
    parts: Parts, text: Path, count: int, *, guidance: float, shift: float, steps: int, seed: int = 0
) -> Score:
    """`count` held-out prompts, one clip each."""
    encoders = Encoders(text, parts.place)
    chosen = score_prompts(count)
    cond, none = encoders([prompt for _, prompt in chosen]), encoders([NEGATIVE])
    video, audio = denoise(parts, cond, none, guidance=guidance, shift=shift, steps=steps, seed=seed)
    clips = [c for i in range(0, count, 16) for c in decode(parts, video[i : i + 16], audio[i : i + 16])]
    scenes = [scene for scene, _ in chosen]
    prompts = [prompt for _, prompt in chosen]
    workers = min(os.cpu_count() or 1, 12)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        return Score(list(pool.map(judge, scenes, clips, prompts)))
