"""What the ranks do in the tests of the documents: tiny pipelines, and the example scripts on them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    FluxPipeline,
    FluxTransformer2DModel,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
)
from dropin_models import alive
from transformers import LlamaConfig, LlamaModel, T5Config, T5EncoderModel

from diptych.model.tiny import clip_encoder, video_vae
from diptych.model.vocabulary import clip_tokenizer, qwen_tokenizer

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
WORDS = ["a", "the", "lighthouse", "dusk", "waves", "rocks", "paper", "boat", "drifts", "down", "rainy", "street"]
HEADS = {"attention_head_dim": 8, "num_attention_heads": 3, "num_layers": 1, "num_single_layers": 1}


def write_flux(folder: Path) -> Path:
    text, clip = qwen_tokenizer(WORDS), clip_tokenizer(WORDS)
    pooled = clip_encoder(clip)
    t5 = T5EncoderModel(T5Config(vocab_size=len(text), d_model=24, d_kv=8, d_ff=32, num_layers=1, num_heads=2))
    transformer = FluxTransformer2DModel(
        in_channels=8,
        joint_attention_dim=24,
        pooled_projection_dim=pooled.config.hidden_size,
        axes_dims_rope=(2, 2, 4),
        guidance_embeds=True,
        **HEADS,
    )
    vae = AutoencoderKL(block_out_channels=(8, 8), latent_channels=2, norm_num_groups=2, **_two_blocks())
    vae.register_to_config(shift_factor=0.1, scaling_factor=0.4)
    FluxPipeline(
        FlowMatchEulerDiscreteScheduler(), vae, pooled, clip, alive(t5), text, alive(transformer)
    ).save_pretrained(folder)
    return folder


def _two_blocks() -> dict[str, Any]:
    return {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}


def write_hunyuan_video(folder: Path) -> Path:
    text, clip = qwen_tokenizer(WORDS), clip_tokenizer(WORDS)
    pooled = clip_encoder(clip)
    llama = LlamaModel(
        LlamaConfig(
            vocab_size=len(text),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=3,
            num_attention_heads=2,
            max_position_embeddings=512,
        )
    )
    transformer = HunyuanVideoTransformer3DModel(
        text_embed_dim=16,
        pooled_projection_dim=pooled.config.hidden_size,
        rope_axes_dim=(2, 2, 4),
        num_refiner_layers=1,
        **HEADS,
    )
    HunyuanVideoPipeline(
        alive(llama), text, alive(transformer), video_vae(), FlowMatchEulerDiscreteScheduler(), pooled, clip
    ).save_pretrained(folder)
    return folder


WRITERS = {"flux": write_flux, "hunyuan_video": write_hunyuan_video}


def write_tiny_pipeline(name: str, folder: Path) -> Path:
    torch.manual_seed(0)
    return WRITERS[name](folder)


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_script(name: str, arguments: list[str]) -> Any:
    return script(name).main(arguments)
