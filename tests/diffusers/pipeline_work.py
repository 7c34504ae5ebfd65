"""What the ranks do in the tests of whole pipelines: stock first, then the same pipeline split."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers import ContextParallelConfig, Kandinsky6TI2VAPipeline, Kandinsky6Transformer3DModel, ParallelConfig
from dropin_models import draw
from dropin_work import enable, off
from PIL import Image

import diptych.diffusers
from diptych.model.config import TINY
from diptych.parallel import Layout

SMALL = {"height": 48, "width": 80, "num_frames": 9, "max_sequence_length": 128}
_pipes: dict[Path, Any] = {}


def pipe_of(folder: Path) -> Any:
    if folder not in _pipes:
        _pipes[folder] = Kandinsky6TI2VAPipeline.from_pretrained(folder, torch_dtype=torch.float32)
        _pipes[folder].set_progress_bar_config(disable=True)
    return _pipes[folder]


def embeds() -> dict[str, Any]:
    """A prompt and a negative one of other lengths, encoded elsewhere."""
    return {
        "prompt_embeds": draw(11, 1, 9, TINY.in_text_dim),
        "pooled_prompt_embeds": draw(12, 1, TINY.in_text_dim2),
        "negative_prompt_embeds": draw(13, 1, 4, TINY.in_text_dim),
        "negative_pooled_prompt_embeds": draw(14, 1, TINY.in_text_dim2),
    }


def run(pipe: Any, call: dict[str, Any]) -> dict[str, Any]:
    call = dict(call)
    if call.pop("from_image", False):
        call["image"] = Image.linear_gradient("L").resize((80, 48)).convert("RGB")
    if call.pop("embedded", False):
        call |= embeds()
    kept: list[Any] = []
    handle = pipe.transformer.register_forward_hook(lambda model, args, output: kept.append(output))
    try:
        frames, sound = pipe(
            **SMALL,
            **call,
            generator=torch.Generator().manual_seed(5),
            return_dict=False,
        )
    finally:
        handle.remove()
    return {"first": kept[0], "forwards": len(kept), "frames": torch.as_tensor(frames), "sound": sound}


def clips(folder: Path, layout: Layout, calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each call: how far the first velocities and the result are from the stock pipeline's."""
    pipe, results = pipe_of(folder), []
    for call in calls:
        stock = run(pipe, call)
        enable(pipe.transformer, layout)
        try:
            split = run(pipe, call)
        finally:
            diptych.diffusers.disable(pipe.transformer)
        result = {
            "velocity": max(off(a, b) for a, b in zip(split["first"], stock["first"], strict=True)),
            "frames": off(split["frames"], stock["frames"]),
            "forwards": (split["forwards"], stock["forwards"]),
            "sound": None,
        }
        if stock["sound"] is not None:
            result["sound"] = off(torch.as_tensor(split["sound"]), torch.as_tensor(stock["sound"]))
        results.append(result)
    return results


def loaded_parallel(folder: Path) -> tuple[bool, float]:
    """`from_pretrained` with a `parallel_config`, no mesh, the whole world."""
    config = ParallelConfig(context_parallel_config=ContextParallelConfig(ulysses_degree=2))
    model = Kandinsky6Transformer3DModel.from_pretrained(folder / "transformer", parallel_config=config)
    call = {
        "hidden_states": draw(1, 1, 3, 6, 10, 33),
        "encoder_hidden_states": draw(2, 1, 7, TINY.in_text_dim),
        "pooled_projections": draw(3, 1, TINY.in_text_dim2),
        "timestep": torch.tensor([321.0]),
    }
    with torch.no_grad():
        split = model(**call).sample
        diptych.diffusers.disable(model)
        return model._parallel_config is None, off(split, model(**call).sample)
