"""Flux: image tokens split, text tokens joint, in front of them."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb
from diffusers.models.transformers.transformer_flux import _get_qkv_projections
from torch import Tensor

from diptych.attention import Joint
from diptych.diffusers.pipeline import Call, PipedBlocks
from diptych.diffusers.processors import SplitProcessor, key_mask
from diptych.diffusers.seams import Seams, submodules
from diptych.errors import LayoutError


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

        text = q.shape[1] - self.shared.rows
        mask = key_mask(attention_mask, q.shape[0], text + plan.tokens)
        joint = Joint(q[:, :text], k[:, :text], v[:, :text], "front", None if mask is None else mask[:, :text])
        image_mask = None if mask is None else mask[:, text:]
        image, text_out = self.beside(q[:, text:], k[:, text:], v[:, text:], joint, image_mask)
        image, text_out = image.flatten(2), text_out.flatten(2)
        if encoder_hidden_states is None:
            return torch.cat([text_out, image], 1)
        return attn.to_out[1](attn.to_out[0](image)), attn.to_add_out(text_out)


class FluxBlocks(PipedBlocks):
    """The text goes with the first patch: half as long as an image, it would cost too much to take it with each."""

    lists = ("transformer_blocks", "single_transformer_blocks")
    names = ("hidden_states", "encoder_hidden_states", "temb", "image_rotary_emb", "joint_attention_kwargs")
    split, beside = "hidden_states", "encoder_hidden_states"

    def piece(self, call: Call, own: slice, patch: int | None) -> Call:
        text = call["encoder_hidden_states"]
        L, with_text = text.shape[1], patch in (None, 0)
        ropes = [torch.cat([x[:L], x[L:][own]]) if with_text else x[L:][own] for x in call["image_rotary_emb"]]
        return call | {
            "hidden_states": call["hidden_states"][:, own],
            "encoder_hidden_states": text if with_text else text[:, :0],
            "image_rotary_emb": tuple(ropes),
        }

    def result(self, output: Any) -> tuple[Tensor, Tensor | None]:
        text, image = output
        return image, text

    def output(self, split: Tensor, beside: Tensor | None) -> Any:
        return beside, split

    def joined(self, besides: list[Tensor | None]) -> Tensor | None:
        return besides[0]


class FluxSeams(Seams):
    stock = ("FluxAttnProcessor",)
    piped = FluxBlocks

    def processors(self) -> dict[str, Any]:
        return {name: FluxProcessor(self.shared) for name in submodules(self.model, {"attn": None})}

    def scatter(self, given: dict[str, Any]) -> dict[str, Any]:
        if self.shared.pipe is not None:
            self._refuse(given)
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

    def _refuse(self, given: dict[str, Any]) -> None:
        """Raises `LayoutError` for what is told to each block, or to every token, of the whole sequence."""
        masked = "attention_mask" in (given.get("joint_attention_kwargs") or {})
        for name in ("controlnet_block_samples", "controlnet_single_block_samples"):
            if given.get(name) is not None:
                raise LayoutError(f"{name} is not accepted with pipeline stages: use ring and ulysses for ControlNets.")
        if masked:
            raise LayoutError("attention_mask is not accepted with pipeline stages: use ring and ulysses with masks.")

    def gather(self, sample: Tensor) -> Tensor:
        return self.shared.shard.gather(sample)
