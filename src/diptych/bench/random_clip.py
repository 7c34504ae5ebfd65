"""A whole clip with random weights: denoised and decoded as the engine does it, where no checkpoint is at hand.

Text encoders and the MP4 are left out: the first take a fraction of a second, and noise is no picture to encode.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Generator

from diptych.bench.geometry import Geometry
from diptych.codecs.audio import decode_audio
from diptych.codecs.tiles import plan_tiles
from diptych.codecs.vae_fast import fuse
from diptych.codecs.video import decode_cost, decode_video, lend_decoder
from diptych.engine.sharing import Sharing
from diptych.model import tiny
from diptych.model.transformer import TextContext, Transformer
from diptych.parallel.deal import Deal
from diptych.sampling.caches import StepCache
from diptych.sampling.denoise import denoise
from diptych.sampling.denoiser import Denoiser
from diptych.sampling.latents import Latents
from diptych.sampling.schedules import FlowSchedule, PiFlowSchedule

GUIDANCE = 5.0
SHIFT = 5.0
STEPS, DISTILLED_STEPS = 50, 10


@dataclass(frozen=True)
class Decoders:
    """The three modules that make picture and sound of latents."""

    vae: Any
    audio_vae: Any
    vocoder: Any

    @classmethod
    def random(cls, device: torch.device, *, small: bool = False, sound: bool = True) -> Decoders:
        """Random weights at the released widths (small: at those of the tiny checkpoint), in the engine's dtypes.

        sound: whether this rank decodes sound too, as the first one does.
        """
        from diffusers import AutoencoderKLHunyuanVideo, MMAudioVAE, MMAudioVocoder

        def ready(module: Any, dtype: torch.dtype) -> Any:
            return module.to(device, dtype).eval().requires_grad_(False)

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            video = tiny.video_vae() if small else AutoencoderKLHunyuanVideo()
            vae = fuse(ready(video, torch.float16 if device.type == "cuda" else torch.float32))
            if not sound:
                return cls(vae, None, None)
            audio = tiny.audio_vae(tiny.AUDIO_SCALING_BASE) if small else MMAudioVAE()
            vocoder = tiny.vocoder() if small else MMAudioVocoder()
        return cls(vae, ready(audio, torch.float32), ready(vocoder, torch.float32))


def denoised(
    model: Transformer,
    contexts: list[TextContext],
    geometry: Geometry,
    sharing: Sharing,
    *,
    device: torch.device,
    steps: int | None = None,
    cache: StepCache | None = None,
    on_step: Callable[[int], None] | None = None,
) -> tuple[Latents, list[float]]:
    """Latents after a whole schedule, and the seconds of each step; all ranks of `sharing` call it together.

    contexts: one for a distilled model, else the conditional and the unconditional one. steps: the model's own if
    None. cache: predicts some of the forwards. on_step: called after each, on every rank.
    """
    config = model.config
    distilled = config.grid > 1
    schedule: FlowSchedule | PiFlowSchedule = (
        PiFlowSchedule(steps or DISTILLED_STEPS, shift=SHIFT) if distilled else FlowSchedule(steps or STEPS, SHIFT)
    )
    T, Y, X = geometry.latents
    generator = Generator("cpu").manual_seed(2)
    noise = Latents(
        torch.randn(1, T, Y, X, config.in_visual_dim, generator=generator),
        torch.randn(1, geometry.audio_tokens, config.in_audio_dim, generator=generator),
    )
    grid = model.grid(T, Y, X, geometry.audio_tokens, tail=False, device=device)
    attend, shard = sharing.split(grid.tokens)
    guidance = GUIDANCE if len(contexts) == 2 else 1.0
    denoiser = Denoiser(model, attend, grid, contexts, guidance, None, shard, sharing.combine, cache=cache)
    ends = [_now(device)]

    def after(index: int, clean: Callable[[], Latents]) -> None:
        ends.append(_now(device))
        if on_step is not None:
            on_step(index)

    latents = denoise(denoiser.velocity, schedule, noise.to(device), after)
    return latents, [b - a for a, b in pairwise(ends)]


def decoded(
    latents: Latents, decoders: Decoders, geometry: Geometry, *, deal: Deal | None = None, budget: int | None = None
) -> npt.NDArray[np.uint8] | None:
    """Frames (1, F, H, W, 3) of the picture, while the sound is decoded too; None on all ranks but the first.

    deal: shares the tiles with other ranks, which call this alike. budget: bytes, as `decode_memory`.
    """
    vae = decoders.vae
    plan = plan_tiles(*geometry.latents, budget, decode_cost(vae))
    video = latents.video.permute(0, 4, 1, 2, 3)
    if deal is not None:
        video = deal.same(video)
        if not deal.first:
            lend_decoder(vae, video, plan, deal)
            return None

    def sound() -> None:
        if latents.audio is not None:
            samples = math.ceil(geometry.frames / 24 * 44_100)
            decode_audio(decoders.audio_vae, decoders.vocoder, latents.audio.permute(0, 2, 1), samples)

    return decode_video(vae, video, plan, None, deal, sound)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
