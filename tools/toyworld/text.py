"""The text encoders: the real classes, tiny, with frozen random weights.

The captions are made of some 150 words, each of which is one token, so random features tell them apart as well as
learned ones; word order is left to the transformer's own text blocks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from diptych.bench.toyworld_captions import words
from diptych.model.template import PREFIX_TOKENS, PROMPT_TEMPLATE

WIDTH, POOLED = 96, 64
MAX_TOKENS = 48
"""Tokens of the longest caption and the end token; the default negative prompt has fewer."""
NEGATIVE = (
    "Static, 2D cartoon, cartoon, 2d animation, paintings, images, "
    "worst quality, low quality, ugly, deformed, walking backwards"
)


def write(folder: Path) -> None:
    """Write `text_encoder`, `tokenizer`, `text_encoder_2` and `tokenizer_2` as they stand in a checkpoint."""
    from transformers import (
        CLIPTextConfig,
        CLIPTextModel,
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
    )

    from diptych.model.template import CLIP_TOKENS
    from diptych.model.vocabulary import clip_tokenizer, qwen_tokenizer, save_processor

    tokenizer, clip = qwen_tokenizer(words()), clip_tokenizer(words())

    def token(name: str) -> int:
        return int(tokenizer.convert_tokens_to_ids(f"<|{name}|>"))

    torch.manual_seed(2026)
    qwen = Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "vocab_size": len(tokenizer),
                "hidden_size": WIDTH,
                "intermediate_size": WIDTH,
                "num_hidden_layers": 1,
                "num_attention_heads": 3,
                "num_key_value_heads": 1,
                "rms_norm_eps": 1e-6,
                "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, "mrope_section": [4, 6, 6]},
                "bos_token_id": token("endoftext"),
                "eos_token_id": token("im_end"),
                "pad_token_id": token("endoftext"),
            },
            vision_config={
                "depth": 1,
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_heads": 1,
                "out_hidden_size": WIDTH,
                "fullatt_block_indexes": [0],
            },
            image_token_id=token("image_pad"),
            video_token_id=token("video_pad"),
            vision_start_token_id=token("vision_start"),
            vision_end_token_id=token("vision_end"),
        )
    )
    pooled = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(clip),
            hidden_size=POOLED,
            intermediate_size=POOLED,
            projection_dim=POOLED,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=CLIP_TOKENS,
            bos_token_id=clip.bos_token_id,
            eos_token_id=clip.eos_token_id,
            pad_token_id=clip.pad_token_id,
        )
    )
    for model, name in ((qwen, "text_encoder"), (pooled, "text_encoder_2")):
        _randomise(model)
        model.to(torch.bfloat16).save_pretrained(folder / name)
    save_processor(tokenizer, folder / "tokenizer")
    clip.save_pretrained(folder / "tokenizer_2")


def _randomise(model: nn.Module) -> None:
    """Token vectors of unit size, layers that add about half as much, positions that hardly show."""
    for name, parameter in model.named_parameters():
        if "position_embedding" in name:
            nn.init.normal_(parameter, std=0.1)
        elif "embed" in name:
            nn.init.normal_(parameter, std=1.0)
        elif parameter.ndim >= 2:
            nn.init.normal_(parameter, std=parameter[0].numel() ** -0.5)


class Encoders:
    """Both encoders on one device: captions in, what the transformer reads out."""

    def __init__(self, folder: Path, place: torch.device) -> None:
        from tokenizers import Tokenizer
        from transformers import CLIPTextModel, Qwen2_5_VLForConditionalGeneration

        self._place = place
        self._words = Tokenizer.from_file(str(folder / "tokenizer" / "tokenizer.json"))
        self._clip_words = Tokenizer.from_file(str(folder / "tokenizer_2" / "tokenizer.json"))
        self._qwen: Any = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            folder / "text_encoder", dtype=torch.float32
        ).to(place)
        self._clip: Any = CLIPTextModel.from_pretrained(folder / "text_encoder_2", dtype=torch.float32).to(place)
        self._pad = self._words.token_to_id("<|endoftext|>")
        self._clip_end = self._clip_words.token_to_id("<|endoftext|>")
        for tokenizer in (self._words, self._clip_words):
            tokenizer.no_padding()
            tokenizer.no_truncation()

    @torch.no_grad()
    def __call__(self, captions: list[str], chunk: int = 2048) -> tuple[Tensor, Tensor, Tensor]:
        """Features (B, MAX_TOKENS, WIDTH), mask (B, MAX_TOKENS), pooled (B, POOLED)."""
        parts = [self._some(captions[i : i + chunk]) for i in range(0, len(captions), chunk)]
        features, mask, pooled = (torch.cat(column) for column in zip(*parts, strict=True))
        return features, mask, pooled

    def _some(self, captions: list[str]) -> tuple[Tensor, Tensor, Tensor]:
        length = PREFIX_TOKENS + MAX_TOKENS
        rows = [e.ids for e in self._words.encode_batch([PROMPT_TEMPLATE.format(c) for c in captions])]
        assert max(map(len, rows)) <= length, "a caption is longer than MAX_TOKENS"
        ids = torch.tensor([row + [self._pad] * (length - len(row)) for row in rows], device=self._place)
        mask = torch.tensor([[1] * len(row) + [0] * (length - len(row)) for row in rows], device=self._place)
        # Causal attention: padding on the right changes nothing before it, so the body alone is run.
        hidden = self._qwen.model.language_model(input_ids=ids, attention_mask=mask).last_hidden_state
        clip_rows = [e.ids for e in self._clip_words.encode_batch(captions)]
        clip_ids = torch.tensor([row + [self._clip_end] * (77 - len(row)) for row in clip_rows], device=self._place)
        pooled = self._clip(input_ids=clip_ids, attention_mask=(clip_ids == clip_ids).long()).pooler_output
        return hidden[:, PREFIX_TOKENS:], mask[:, PREFIX_TOKENS:].bool(), pooled
