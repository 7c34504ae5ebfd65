"""From the weights of the stages to a checkpoint folder that stock diffusers and Diptych load."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, Kandinsky6Transformer3DModel, PiflowScheduler

from diptych.bench.toyworld import FPS, FRAMES, HEIGHT, WIDTH
from tools.toyworld import audio_parts, flow, text, twin, video_vae

MAX_BYTES = 24_000_000
SHIFT = 3.0
"""Of the noise levels when a clip is made; the release has 5, for clips of many more tokens."""
DEFAULTS = {
    "width": WIDTH,
    "height": HEIGHT,
    "frames": FRAMES,
    "fps": FPS,
    "steps": 20,
    "guidance": 3.0,
    "example": "a red circle bounces on a blue floor",
}
"""What a request is filled from: fields of `diptych.request.ClipDefaults`, stored as diptych.json."""


def export(folder: Path, weights: Path) -> Path:
    """Write the checkpoint; returns `folder`.

    weights: a folder with flow.safetensors and factors.txt, video.safetensors, audio.safetensors and
    vocoder.safetensors, as the stages write them.
    """
    video_factor, audio_factor = map(float, (weights / "factors.txt").read_text().split())
    transformer = flow.build()
    flow.resume_average(weights / "flow.safetensors", transformer)
    parts: dict[str, tuple[Any, torch.dtype]] = {
        "transformer": (transformer, torch.bfloat16),
        "vae": (video_vae.load(weights / "video.safetensors", video_factor), torch.float16),
        "audio_vae": (audio_parts.load_vae(weights / "audio.safetensors", audio_factor), torch.float16),
        "vocoder": (audio_parts.load_vocoder(weights / "vocoder.safetensors"), torch.float16),
    }
    return assemble(folder, parts)


def export_twin(folder: Path, weights: Path, base: Path) -> Path:
    """Write the distilled checkpoint, all but transformer and scheduler as in `base`; returns `folder`."""
    teacher = Kandinsky6Transformer3DModel.from_pretrained(base / "transformer")
    model = twin.build(teacher)
    flow.resume_average(weights, model)
    other = shutil.ignore_patterns("transformer", "scheduler", "model_index.json", "diptych.json")
    shutil.copytree(base, folder, dirs_exist_ok=True, ignore=other)
    model.to(torch.bfloat16).save_pretrained(folder / "transformer")
    scheduler = PiflowScheduler(shift=SHIFT)
    scheduler.save_pretrained(folder / "scheduler")
    defaults = DEFAULTS | {"steps": twin.STEPS, "guidance": 1.0}
    (folder / "diptych.json").write_text(json.dumps(defaults, indent=2) + "\n")
    index = json.loads((base / "model_index.json").read_text())
    index["scheduler"] = ["diffusers", type(scheduler).__name__]
    # The index comes last: without it a folder is no checkpoint.
    (folder / "model_index.json").write_text(json.dumps(index, indent=2) + "\n")
    return folder


def assemble(folder: Path, parts: dict[str, tuple[Any, torch.dtype]]) -> Path:
    """Save the parts in their dtypes beside the text encoders, and write the index and the defaults."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (model, dtype) in parts.items():
        model.to(dtype).save_pretrained(folder / name)
    text.write(folder)
    scheduler = FlowMatchEulerDiscreteScheduler(shift=SHIFT)
    scheduler.save_pretrained(folder / "scheduler")
    index = {name: ["diffusers", type(model).__name__] for name, (model, _) in parts.items()}
    index |= {
        "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
        "text_encoder_2": ["transformers", "CLIPTextModel"],
        "tokenizer": ["transformers", "Qwen2_5_VLProcessor"],
        "tokenizer_2": ["transformers", "CLIPTokenizer"],
        "scheduler": ["diffusers", type(scheduler).__name__],
    }
    head = {"_class_name": "Kandinsky6TI2VAPipeline", "_diffusers_version": scheduler.config["_diffusers_version"]}
    (folder / "model_index.json").write_text(json.dumps(head | dict(sorted(index.items())), indent=2) + "\n")
    (folder / "diptych.json").write_text(json.dumps(DEFAULTS, indent=2) + "\n")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    assert size <= MAX_BYTES, f"the checkpoint has {size:,} bytes, more than {MAX_BYTES:,}"
    return folder
