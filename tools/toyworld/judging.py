"""Clips of held-out prompts made in large batches and judged, where an engine would make them one by one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLHunyuanVideo, Kandinsky6Transformer3DModel, MMAudioVAE, MMAudioVocoder
from torch import Tensor

from diptych.bench.score import Score, judge
from diptych.bench.toyworld import FPS
from diptych.bench.toyworld_captions import score_prompts
from diptych.media.clip import Clip
from diptych.parallel.guidance import guided
from diptych.sampling.denoise import denoise as sample
from diptych.sampling.latents import Latents
from diptych.sampling.schedules import Schedule
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

    @classmethod
    def open(cls, folder: Path, place: torch.device) -> Parts:
        """All of a checkpoint folder, in float32."""
        classes = {
            "transformer": Kandinsky6Transformer3DModel,
            "vae": AutoencoderKLHunyuanVideo,
            "audio_vae": MMAudioVAE,
            "vocoder": MMAudioVocoder,
        }
        parts = {
            name: kind.from_pretrained(folder / name, torch_dtype=torch.float32).eval().to(place)
            for name, kind in classes.items()
        }
        factors = tuple(float(parts[name].config.scaling_factor) for name in ("vae", "audio_vae"))
        return cls(**parts, factors=factors, place=place)


Text = tuple[Tensor, Tensor, Tensor]
"""Features, mask and pooled features, as `Encoders` gives them."""


@torch.no_grad()
def denoise(
    parts: Parts, cond: Text, none: Text, schedule: Schedule, *, guidance: float, seed: int
) -> tuple[Tensor, Tensor]:
    """Latents of one clip per caption: video (B, T, Y, X, C) and audio (B, A, C); as the engine, without guidance
    where it is 1."""
    B, place = len(cond[0]), parts.place
    generator = torch.Generator().manual_seed(seed)
    start = Latents(*(torch.randn(B, *size, generator=generator).to(place) for size in ((13, 8, 12, 16), (88, 40))))
    lanes = 1 if guidance == 1.0 else 2
    both = [torch.cat([a, b.expand(B, *b.shape[1:])])[: lanes * B] for a, b in zip(cond, none, strict=True)]

    def velocity(latents: Latents, timestep: Tensor) -> Latents:
        video, audio = latents
        assert audio is not None
        noisy = torch.cat([video, torch.zeros_like(video), torch.zeros_like(video[..., :1])], dim=-1)
        with torch.autocast(place.type, torch.bfloat16):
            out = parts.transformer(
                hidden_states=noisy.repeat(lanes, 1, 1, 1, 1),
                encoder_hidden_states=both[0],
                pooled_projections=both[2],
                timestep=torch.full((lanes * B,), float(timestep), device=place),
                audio_hidden_states=audio.repeat(lanes, 1, 1),
                encoder_attention_mask=both[1],
                return_dict=False,
            )
        return Latents(*(o.float() if lanes == 1 else guided(*o.chunk(2), guidance) for o in out))

    video, audio = sample(velocity, schedule, start)
    assert audio is not None
    return video, audio


@torch.no_grad()
def decode(parts: Parts, video: Tensor, audio: Tensor) -> list[Clip]:
    frames = parts.vae.decode(video.movedim(-1, 1) / parts.factors[0]).sample
    pixels = ((frames.clamp(-1, 1) + 1) * 127.5).round().byte().movedim(1, -1).cpu().numpy()
    mel = parts.audio_vae.decode(audio.movedim(-1, 1) / parts.factors[1]).sample
    waves = parts.vocoder(mel).sample[:, 0].float().cpu().numpy()
    return [Clip(frames=p, audio=w.astype(np.float32), fps=FPS) for p, w in zip(pixels, waves, strict=True)]


@contextmanager
def judges(clips: int) -> Iterator[Executor]:
    """Processes that read so many clips at once; started, and made to import what they need, before the first comes."""
    workers = min(os.cpu_count() or 1, 12, clips)
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for _ in range(workers):
            pool.submit(Score)
        yield pool


def judge_many(
    parts: Parts, text: Path, count: int, schedule: Schedule, readers: Executor, *, guidance: float, seed: int = 0
) -> Score:
    """`count` held-out prompts, one clip each."""
    encoders = Encoders(text, parts.place)
    chosen = score_prompts(count)
    scenes, prompts = zip(*chosen, strict=True)
    cond, none = encoders(list(prompts)), encoders([NEGATIVE])
    video, audio = denoise(parts, cond, none, schedule, guidance=guidance, seed=seed)
    clips = (c for i in range(0, count, 16) for c in decode(parts, video[i : i + 16], audio[i : i + 16]))
    return Score(list(readers.map(judge, scenes, clips, prompts, [seed] * count)))
