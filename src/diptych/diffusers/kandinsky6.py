"""Kandinsky 6: video tokens split, text and audio on every rank.

Only two attentions meet tokens of other ranks: the video's self-attention, and the audio's attention to the video.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.transformers.transformer_kandinsky6 import apply_rotary
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from diptych.attention import Place
from diptych.diffusers.pipeline import Call, Pipe, PipedBlocks
from diptych.diffusers.processors import SplitProcessor
from diptych.diffusers.seams import Seams, Shared, submodules


class Kandinsky6Processor(SplitProcessor):
    """`from_video` False: video self-attention. True: audio from video, whose queries are on every rank."""

    def __init__(self, shared: Shared, from_video: bool) -> None:
        super().__init__(shared)
        self.from_video = from_video

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        rotary_emb: Tensor | None = None,
        rotary_emb_kv: Tensor | None = None,
        attn_mask: Tensor | None = None,
    ) -> Tensor:
        assert attn_mask is None, "masks belong to text, which is on every rank"
        source = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q_BSHK = attn.query_norm(attn.to_query(hidden_states).unflatten(-1, (attn.num_heads, -1)))
        k_BSHK = attn.key_norm(attn.to_key(source).unflatten(-1, (attn.num_heads, -1)))
        v_BSHK = attn.to_value(source).unflatten(-1, (attn.num_heads, -1))
        if rotary_emb is not None:
            q_BSHK = apply_rotary(q_BSHK, rotary_emb)
        if rotary_emb_kv is not None:
            k_BSHK = apply_rotary(k_BSHK, rotary_emb_kv)
        attend = self.across if self.from_video else self.within
        return attn.out_layer(attend(q_BSHK, k_BSHK, v_BSHK).flatten(-2))  # type: ignore[no-any-return]


class Kandinsky6Blocks(PipedBlocks):
    """The sound travels with every patch, and counts after the last, for which all keys are this step's."""

    lists = ("visual_transformer_blocks",)
    names = ("vis", "aud", "text_v", "text_a", "time_embed", "vis_rope", "aud_rope", "attn_mask")
    split, beside = "vis", "aud"

    def piece(self, call: Call, own: slice, patch: int | None) -> Call:
        return call | {"vis": call["vis"][:, own], "vis_rope": call["vis_rope"][own]}

    def result(self, output: Any) -> tuple[Tensor, Tensor | None]:
        vis, aud = output
        return vis, aud

    def output(self, split: Tensor, beside: Tensor | None) -> Any:
        return split, beside

    def joined(self, besides: list[Tensor | None]) -> Tensor | None:
        return besides[-1]


class Kandinsky6Seams(Seams):
    """The model sees a clip of s frames of one patch each: this rank's tokens, one after the other."""

    stock = ("Kandinsky6AttnProcessor",)
    piped = Kandinsky6Blocks

    def __init__(self, model: Any, place: Place, pipe: Pipe | None = None) -> None:
        super().__init__(model, place, pipe)
        self.patch = tuple(model.config.patch_size)
        self.grid = (0, 0, 0)

    def processors(self) -> dict[str, Any]:
        return {
            name: Kandinsky6Processor(self.shared, from_video)
            for name, from_video in submodules(
                self.model, {"video_dec_block.self_attention": False, "av_cross_attention": True}
            ).items()
        }

    def hooks(self) -> list[RemovableHandle]:
        return [self.model.visual_rope_embeddings.register_forward_hook(self._cut_rope)]

    def scatter(self, given: dict[str, Any]) -> dict[str, Any]:
        latents_BTYXC, types_BT = given["hidden_states"], given.get("visual_token_type_ids")
        self.grid = T, Y, X = _patches(latents_BTYXC.shape[1:4], self.patch)
        shard = self.shared.begin(T * Y * X)
        t, y, x = self.patch
        patches = latents_BTYXC.unflatten(3, (X, x)).unflatten(2, (Y, y)).unflatten(1, (T, t))
        tokens = patches.permute(0, 1, 3, 5, 2, 4, 6, 7).flatten(1, 3)  # (B, S, t, y, x, C)
        given = given | {"hidden_states": shard.scatter(tokens).flatten(1, 2)}
        if given.get("visual_rope_pos") is None:  # the model would number the tokens that it sees
            given["visual_rope_pos"] = tuple(torch.arange(n, device=latents_BTYXC.device) for n in self.grid)
        if types_BT is not None:
            given["visual_token_type_ids"] = shard.scatter(types_BT.repeat_interleave(Y * X, 1))
        return given

    def gather(self, sample: Tensor) -> Tensor:
        (T, Y, X), (t, y, x) = self.grid, self.patch
        own_BsC = sample.unflatten(1, (-1, t)).flatten(2)
        all_BSC = self.shared.shard.gather(own_BsC)
        patches: Tensor = all_BSC.unflatten(2, (t, y, x, -1)).unflatten(1, (T, Y, X))
        return patches.permute(0, 1, 4, 2, 5, 3, 6, 7).reshape(-1, T * t, Y * y, X * x, patches.shape[-1])

    def _cut_rope(self, module: Any, args: Any, rope: Tensor) -> Tensor:
        return self.shared.shard.scatter(rope.flatten(0, 2), 0)[:, None, None]


def _patches(sizes: Any, patch: tuple[int, ...]) -> tuple[int, int, int]:
    T, Y, X = (size // step for size, step in zip(sizes, patch, strict=True))
    return T, Y, X
