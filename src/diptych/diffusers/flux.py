"""Flux: image tokens split, text tokens joint, in front of them."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import _get_qkv_projections
from torch import Tensor

from diptych.attention import Joint
from diptych.diffusers.processors import SplitProcessor, key_mask
from diptych.diffusers.seams import Seams, submodules


class FluxProcessor(SplitProcessor):
    """Of double blocks, which give text and image apart, and of single blocks, which give them in one tensor."""

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> Any:
        plan = self.shared.shard.plan
        q, k, v, *of_text = _get_qkv_projections(attn, hidden_states, encoder_hidden_states)
        q, k, v = (x.unflatten(-1, (-1, attn.head_dim)) for x in (q, k, v))
        q, k = attn.norm_q(q), attn.norm_k(k)
        if encoder_hidden_states is not None:
            q_text, k_text, v_text = (x.unflatten(-1, (-1, attn.head_dim)) for x in of_text)
            q_text, k_text = attn.norm_added_q(q_text), attn.norm_added_k(k_text)
            q, k, v = (torch.cat(pair, 1) for pair in ((q_text, q), (k_text, k), (v_text, v)))
        if image_rotary_emb is not None:
            q, k = (apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in (q, k))

        text = q.shape[1] - plan.span.size
        mask = key_mask(attention_mask, q.shape[0], text + plan.tokens)
        joint = Joint(q[:, :text], k[:, :text], v[:, :text], "front", None if mask is None else mask[:, :text])
        image_mask = None if mask is None else mask[:, text:]
        image, text_out = self.beside(q[:, text:], k[:, text:], v[:, text:], joint, image_mask)
        image, text_out = image.flatten(2), text_out.flatten(2)
        if encoder_hidden_states is None:
            return torch.cat([text_out, image], 1)
        return attn.to_out[1](attn.to_out[0](image)), attn.to_add_out(text_out)


class FluxSeams(Seams):
    stock = ("FluxAttnProcessor",)

    def processors(self) -> dict[str, Any]:
        return {name: FluxProcessor(self.shared) for name in submodules(self.model, {"attn": None})}

    def scatter(self, given: dict[str, Any]) -> dict[str, Any]:
        shard = self.shared.begin(given["hidden_states"].shape[1])
        ids = given["img_ids"]
        cut: dict[str, Any] = {
            "hidden_states": shard.scatter(given["hidden_states"]),
            "img_ids": shard.scatter(ids, ids.ndim - 2),
        }
        for name in ("controlnet_block_samples", "controlnet_single_block_samples"):
            if given.get(name) is not None:
                cut[name] = [shard.scatter(sample) for sample in given[name]]
        return given | cut

    def gather(self, sample: Tensor) -> Tensor:
        return self.shared.shard.gather(sample)
