"""A complete Kandinsky 6 checkpoint of a few megabytes with seeded random weights, in the released classes and layout.

Real are: every folder, class and key, the compressions (8x8x4 video, 1,024 samples an audio latent, 44.1 kHz), the
numbers of VAE blocks and vocoder stages, and the 129 tokens of the prompt template. Small are only the widths.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from diptych.errors import CheckpointError
from diptych.model.config import TINY, TransformerConfig
from diptych.model.keys import stays_as_stored
from diptych.model.template import CLIP_TOKENS
from diptych.model.tiny_weights import RULES, fill
from diptych.model.vocabulary import clip_tokenizer, qwen_tokenizer, save_processor

if TYPE_CHECKING:
    from transformers import CLIPTokenizer, Qwen2Tokenizer

Dtypes = Literal["float32", "released"]

_WORDS = """
a an and at by for in is it of on over the to under with
red green blue yellow white black small large bright dark slow fast quiet loud
ball bell bird boat camera cat circle city clouds dog drum fire forest horse light moon night piano rain
river sea sings sky square stars street sun train tree water wind woman man
burning falling flying moving playing ringing rolling running singing turning walking
Static cartoon animation paintings images worst low quality ugly deformed backwards
"""

SCALING_FACTOR = 0.476986
AUDIO_SCALING_BASE, AUDIO_SCALING_DISTILLED = 0.5302, 0.417


def write_tiny(folder: str | Path, distilled: bool = False, seed: int = 0, *, dtypes: Dtypes = "float32") -> Path:
    """Write a tiny checkpoint that `diffusers.Kandinsky6TI2VAPipeline.from_pretrained` loads; returns the folder.

    distilled: tenfold heads and the PiFlow scheduler, as the released distilled models have.
    seed: of every weight; the same seed gives the same bytes.
    dtypes: `float32`, or `released`: the mixture of float32 and bfloat16 of the released files, and the second copy
    of the vocoder that their audio_vae folders hold.

    Raises `CheckpointError` if the folder cannot be written or holds something else.
    """
    from diffusers import FlowMatchEulerDiscreteScheduler, PiflowScheduler

    folder = Path(folder)
    if folder.exists() and (
        not folder.is_dir() or (any(folder.iterdir()) and not (folder / "model_index.json").exists())
    ):
        raise CheckpointError(
            f"{folder} is in the way: give a new folder, an empty one, or one that holds a checkpoint"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        text, clip = qwen_tokenizer(_WORDS.split()), clip_tokenizer(_WORDS.split())
        config = TINY.distilled() if distilled else TINY
        with torch.random.fork_rng(devices=[]):  # the classes draw their own weights from the global generator
            models = {
                "transformer": transformer(config),
                "vae": video_vae(),
                "text_encoder": text_encoder(text),
                "text_encoder_2": clip_encoder(clip),
                "audio_vae": audio_vae(AUDIO_SCALING_DISTILLED if distilled else AUDIO_SCALING_BASE),
                "vocoder": vocoder(),
            }
        for name, model in models.items():
            fill(model, RULES[name], seed + zlib.crc32(name.encode()))
            if dtypes == "released":
                _as_released(name, model, distilled)
            with _no_bars():
                model.save_pretrained(folder / name)
        if dtypes == "released":
            _copy_vocoder(folder)
        save_processor(text, folder / "tokenizer")
        clip.save_pretrained(folder / "tokenizer_2")
        scheduler = PiflowScheduler(shift=5.0) if distilled else FlowMatchEulerDiscreteScheduler(shift=5.0)
        scheduler.save_pretrained(folder / "scheduler")
        index = {name: [type(m).__module__.split(".")[0], type(m).__name__] for name, m in models.items()}
        index["tokenizer"] = ["transformers", "Qwen2_5_VLProcessor"]
        index["tokenizer_2"] = ["transformers", "CLIPTokenizer"]
        index["scheduler"] = ["diffusers", type(scheduler).__name__]
        head = {"_class_name": "Kandinsky6TI2VAPipeline", "_diffusers_version": scheduler.config["_diffusers_version"]}
        (folder / "model_index.json").write_text(json.dumps(head | dict(sorted(index.items())), indent=2) + "\n")
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror or error}") from error
    return folder


def transformer(config: TransformerConfig) -> Any:
    """The stock transformer class at `config`; weights as the class draws them."""
    from diffusers import Kandinsky6Transformer3DModel

    return Kandinsky6Transformer3DModel(**config.to_dict())


def video_vae() -> Any:
    """AutoencoderKLHunyuanVideo with the real compressions and blocks, 8 to 24 channels wide."""
    from diffusers import AutoencoderKLHunyuanVideo

    return AutoencoderKLHunyuanVideo(
        block_out_channels=(8, 16, 24, 24), norm_num_groups=4, layers_per_block=2, scaling_factor=SCALING_FACTOR
    )


def text_encoder(tokenizer: Qwen2Tokenizer) -> Any:
    """Qwen2.5-VL with 3 layers of width 48, of which one head reads for three, and a vision tower of 2 blocks."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    width = TINY.in_text_dim
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("image_pad", "video_pad")}
    ids |= {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in ("vision_start", "vision_end")}
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": width,
            "intermediate_size": 2 * width,
            "num_hidden_layers": 3,
            "num_attention_heads": 3,
            "num_key_value_heads": 1,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [2, 3, 3]},
            "bos_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
            "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
            "pad_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": width,
            "fullatt_block_indexes": [1],
        },
        image_token_id=ids["image_pad"],
        video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"],
        vision_end_token_id=ids["vision_end"],
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def clip_encoder(tokenizer: CLIPTokenizer) -> Any:
    """CLIPTextModel with 77 positions and 2 layers of width 24."""
    from transformers import CLIPTextConfig, CLIPTextModel

    width = TINY.in_text_dim2
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=3,
        max_position_embeddings=CLIP_TOKENS,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return CLIPTextModel(config)


def audio_vae(scaling_factor: float) -> Any:
    """MMAudioVAE with the real front end (44.1 kHz, 2,048 points, hop 512, 128 mels) and 40 latents, 16 wide."""
    from diffusers import MMAudioVAE

    return MMAudioVAE(hidden_channels=16, scaling_factor=scaling_factor)


def vocoder() -> Any:
    """MMAudioVocoder with the real six stages (512 samples a mel frame), 64 wide at the first."""
    from diffusers import MMAudioVocoder

    return MMAudioVocoder(upsample_initial_channel=64)


def _as_released(component: str, model: nn.Module, distilled: bool) -> None:
    """Cast to what the released files store: facts of their sizes, not of their code."""
    if component not in ("transformer", "text_encoder"):
        return
    for name, parameter in model.named_parameters():
        single = component == "transformer" and stays_as_stored(name) and not (distilled and "modulation" in name)
        parameter.data = parameter.data.to(torch.float32 if single else torch.bfloat16)


@contextmanager
def _no_bars() -> Iterator[None]:
    """Without the progress bars that transformers draws even for one small file."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _copy_vocoder(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    file = "diffusion_pytorch_model.safetensors"
    tensors = load_file(folder / "audio_vae" / file)
    tensors |= {f"vocoder.{name}": tensor for name, tensor in load_file(folder / "vocoder" / file).items()}
    save_file(tensors, folder / "audio_vae" / file, metadata={"format": "pt"})
