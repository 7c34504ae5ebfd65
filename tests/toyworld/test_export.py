"""The export: a folder that stock diffusers and Diptych load, small enough to ship. Weights are untrained here."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tools.toyworld import audio_parts, export, flow, text, video_vae
from tools.toyworld.judging import Parts, decode, denoise
from tools.toyworld.training import save_state

from diptych.bench.toyworld_captions import score_prompts
from diptych.model.checkpoint import Checkpoint
from diptych.request import ClipDefaults
from diptych.sampling.schedules import FlowSchedule


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the stages leave behind, before any training."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("weights")
    model = flow.build()
    flow.save(folder, model, flow.Average(model, 0.9))
    save_state(folder / "video.safetensors", video_vae.build(), None)
    save_state(folder / "audio.safetensors", audio_parts.build_vae(), None)
    save_state(folder / "vocoder.safetensors", audio_parts.build_vocoder(), None)
    (folder / "factors.txt").write_text("0.91 1.25\n")
    return folder


@pytest.fixture(scope="module")
def checkpoint(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export.export(tmp_path_factory.mktemp("demo"), weights)


def test_it_is_small_enough_to_ship(checkpoint: Path) -> None:
    assert sum(f.stat().st_size for f in checkpoint.rglob("*") if f.is_file()) <= 24_000_000


def test_defaults_are_fields_of_a_request(checkpoint: Path) -> None:
    defaults = ClipDefaults(**json.loads((checkpoint / "diptych.json").read_text()))
    assert (defaults.width, defaults.height, defaults.frames) == (96, 64, 49)


def test_diptych_reads_it(checkpoint: Path) -> None:
    found = Checkpoint.open(checkpoint)
    assert found.transformer.to_dict() == flow.CONFIG
    assert found.has_audio


def test_stock_diffusers_runs_it(checkpoint: Path) -> None:
    from diffusers import Kandinsky6TI2VAPipeline
    from PIL import Image

    pipe = Kandinsky6TI2VAPipeline.from_pretrained(checkpoint)
    pipe.set_progress_bar_config(disable=True)
    assert pipe.vae.config.scaling_factor == 0.91
    assert pipe.audio_vae.config.scaling_factor == 1.25
    out = pipe(
        "a red circle bounces on a blue floor",
        image=Image.new("RGB", (96, 64), (30, 60, 160)),
        height=64,
        width=96,
        num_frames=5,
        num_inference_steps=1,
        output_type="np",
        max_sequence_length=48,
    )
    assert out.frames[0].shape == (5, 64, 96, 3)
    assert out.audio[0].shape == (9 * 1024,)


def test_captions_are_encoded_as_the_pipeline_encodes_them(checkpoint: Path) -> None:
    from diffusers import Kandinsky6TI2VAPipeline
    from transformers import CLIPTokenizer, Qwen2_5_VLProcessor

    captions = [prompt for _, prompt in score_prompts(3)] + [text.NEGATIVE]
    assert text.NEGATIVE == Kandinsky6TI2VAPipeline._DEFAULT_NEGATIVE_PROMPT
    encoders = text.Encoders(checkpoint, torch.device("cpu"))
    hidden, mask, pooled = encoders(captions)
    stock_hidden, stock_pooled, stock_mask = Kandinsky6TI2VAPipeline._get_prompt_embeds(
        captions,
        Qwen2_5_VLProcessor.from_pretrained(checkpoint / "tokenizer"),
        encoders._qwen,
        CLIPTokenizer.from_pretrained(checkpoint / "tokenizer_2"),
        encoders._clip,
        text.MAX_TOKENS,
        "cpu",
    )
    assert torch.equal(mask, stock_mask)
    torch.testing.assert_close(pooled, stock_pooled, rtol=0, atol=1e-5)
    torch.testing.assert_close(hidden[mask], stock_hidden[mask], rtol=0, atol=1e-5)


def test_clips_for_judging_come_in_batches(weights: Path, checkpoint: Path) -> None:
    place = torch.device("cpu")
    model = flow.build()
    files = (weights / f"{name}.safetensors" for name in ("video", "audio", "vocoder"))
    parts = Parts.load(model, *files, 0.91, 1.25, place)
    encoders = text.Encoders(checkpoint, place)
    cond, none = encoders([score_prompts(1)[0][1]]), encoders([text.NEGATIVE])
    video, audio = denoise(parts, cond, none, FlowSchedule(1, flow.SHIFT), guidance=5.0, seed=0)
    clip = decode(parts, video[:, :2], audio[:, :9])[0]
    assert clip.frames.shape == (5, 64, 96, 3)
    assert clip.audio is not None
    assert clip.audio.shape == (9 * 1024,)
