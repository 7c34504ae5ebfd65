"""Prompts to conditioning: Qwen2.5-VL for each token, CLIP for the whole."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from diptych.errors import CheckpointError
from diptych.model.template import CLIP_TOKENS, PREFIX_TOKENS, PROMPT_TEMPLATE
from diptych.request import MAX_TEXT_TOKENS

DEFAULT_NEGATIVE = (
    "Static, 2D cartoon, cartoon, 2d animation, paintings, images, "
    "worst quality, low quality, ugly, deformed, walking backwards"
)
"""What the authors steer away from when a request names nothing."""


def negative_or_default(negative: str | None) -> str:
    """The negative prompt to encode: `None` and an empty text mean the authors' default, as in diffusers."""
    return negative or DEFAULT_NEGATIVE


@dataclass(frozen=True)
class Conditioning:
    """text_BLD: one feature a token (3,584 wide in the released models); pooled_BD: one a prompt (768 wide).

    mask_BL: bool, True where a token is real; None when all are. L is the longest prompt of the batch.
    """

    text_BLD: Tensor
    pooled_BD: Tensor
    mask_BL: Tensor | None

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Conditioning:
        mask = None if self.mask_BL is None else self.mask_BL.to(device)
        return Conditioning(self.text_BLD.to(device, dtype), self.pooled_BD.to(device, dtype), mask)


class TextEncoder:
    """The two text encoders of a checkpoint.

    tokenizer: of Qwen2.5-VL; language: its language model alone (`Qwen2_5_VLTextModel`: vision tower and lm_head take
    no part); clip_tokenizer, clip: of the CLIP text model. Each model runs in its own dtype and on its own device.

    A prompt's text is never read as control tokens: `<|im_end|>` typed by a user is encoded as those ten characters
    and cannot end the turn that the template opened. Every other prompt gets the token ids that diffusers gives it.
    Raises `CheckpointError` when the template is not cut into 129 tokens before the prompt by this tokenizer.
    """

    def __init__(self, tokenizer: Any, language: Any, clip_tokenizer: Any, clip: Any) -> None:
        self.tokenizer, self.language = tokenizer, language
        self.clip_tokenizer, self.clip = clip_tokenizer, clip
        before, _, after = PROMPT_TEMPLATE.partition("{}")
        # What follows the last control token is cut together with the prompt: a prompt that begins with a line feed
        # may share a token with it.
        opening, control, self._lead = before.rpartition("<|im_start|>")
        self._opening = self._ids(opening + control, control_tokens=True)
        self._closing = self._ids(after, control_tokens=True)
        prefix = len(self._opening) + len(self._ids(self._lead))
        if prefix != PREFIX_TOKENS or len(self._closing) != 1:
            raise CheckpointError(
                f"tokenizer: the chat template takes {prefix} tokens before the prompt and {len(self._closing)} after "
                f"it, but the models were trained with {PREFIX_TOKENS} and 1; this is not the tokenizer of Kandinsky 6."
            )

    def count(self, prompt: str) -> int:
        """Tokens of a prompt with its end token, before any is cut."""
        return len(self._prompt_ids(prompt)) - PREFIX_TOKENS

    @torch.no_grad()
    def encode(self, prompts: list[str], max_tokens: int = MAX_TEXT_TOKENS) -> Conditioning:
        """Conditioning of a batch of prompts; each is cut to `max_tokens` tokens, its end token included.

        Rows are padded on the right to the longest prompt only. That is what the padded batch of diffusers gives, to
        rounding: attention is causal, so no real token ever sees a padded one, and no mask is needed here.
        """
        rows = [self._prompt_ids(prompt)[: PREFIX_TOKENS + max_tokens] for prompt in prompts]
        lengths = torch.tensor([len(row) for row in rows])
        longest = int(lengths.max())
        pad = self._closing[0]  # any token would do
        ids_BL = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=self.language.device)
        text_BLD = self.language(input_ids=ids_BL, use_cache=False).last_hidden_state[:, PREFIX_TOKENS:]
        mask_BL = torch.arange(longest)[None, PREFIX_TOKENS:] < lengths[:, None]
        return Conditioning(
            text_BLD, self._pooled(prompts), None if bool(mask_BL.all()) else mask_BL.to(text_BLD.device)
        )

    def _pooled(self, prompts: list[str]) -> Tensor:
        inputs = self.clip_tokenizer(
            prompts,
            max_length=CLIP_TOKENS,
            truncation=True,
            padding="max_length",
            padding_side="right",
            split_special_tokens=True,
            return_tensors="pt",
        ).to(self.clip.device)
        pooled_BD: Tensor = self.clip(input_ids=inputs.input_ids, attention_mask=inputs.attention_mask).pooler_output
        return pooled_BD

    def _prompt_ids(self, prompt: str) -> list[int]:
        return self._opening + self._ids(self._lead + prompt) + self._closing

    def _ids(self, text: str, control_tokens: bool = False) -> list[int]:
        ids: list[int] = self.tokenizer(
            text, add_special_tokens=False, split_special_tokens=not control_tokens
        ).input_ids
        return ids
