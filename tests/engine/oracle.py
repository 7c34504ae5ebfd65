"""The oracle: stock diffusers' pipeline on the same checkpoint, float32, on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import Kandinsky6TI2VAPipeline

from diptych.media.images import load_image
from diptych.request import ClipDefaults, ClipRequest


@dataclass(frozen=True)
class Truth:
    """video (B, C, T, Y, X) and audio (B, C, A) latents; frames (B, F, H, W, 3) in 0..1; sound (B, samples)."""

    video: torch.Tensor
    audio: torch.Tensor | None
    frames: np.ndarray
    sound: np.ndarray | None


def load(folder: Path) -> Kandinsky6TI2VAPipeline:
    pipe = Kandinsky6TI2VAPipeline.from_pretrained(folder, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def run(
    pipe: Kandinsky6TI2VAPipeline, requests: list[ClipRequest], defaults: ClipDefaults, max_tokens: int = 128
) -> Truth:
    """One generator a clip, as our requests have a seed each.

    max_tokens only saves time: the pipeline pads every prompt to it.
    """
    first = requests[0].resolve(defaults)
    images = [load_image(r.image) for r in requests if r.image is not None] or None
    call: dict[str, Any] = {
        "prompt": [r.prompt for r in requests],
        "negative_prompt": requests[0].negative,
        "image": images,
        "height": first.height,
        "width": first.width,
        "num_frames": requests[0].frames,
        "frame_rate": first.fps,
        "num_inference_steps": first.steps,
        "guidance_scale": first.guidance,
        "sample_audio": first.request.audio,
    }
    generators = [torch.Generator().manual_seed(r.seed) for r in requests]
    last: dict[str, torch.Tensor] = {}

    def keep(pipe: Any, step: int, t: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        last.update({name: tensor for name, tensor in tensors.items() if tensor is not None})
        return {}

    frames, sound = pipe(
        **call,
        generator=generators,
        output_type="np",
        return_dict=False,
        max_sequence_length=max_tokens,
        callback_on_step_end=keep,
        callback_on_step_end_tensor_inputs=["latents", "audio_latents"],
    )
    video = last["latents"][:, : first.T].permute(0, 4, 1, 2, 3)
    audio = last["audio_latents"].permute(0, 2, 1) if first.request.audio else None
    return Truth(video, audio, frames, sound)
