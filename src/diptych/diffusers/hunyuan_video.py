"""HunyuanVideo, from text or an image: video tokens split, text tokens joint, behind them."""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.embeddings import apply_rotary_emb
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from diptych.attention import Joint, Place
from diptych.diffusers.pipeline import Pipe
from diptych.diffusers.processors import SplitProcessor, key_mask
from diptych.diffusers.seams import Seams
from diptych.parallel import TokenShard


class HunyuanVideoProcessor(SplitProcessor):
    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        image_rotary_emb: Any = None,
    ) -> tuple[Tensor, Tensor]:
        video = hidden_states.shape[1]
        if attn.add_q_proj is None:  # a single block: text and video share the projections
            both = torch.cat([hidden_states, encoder_hidden_states], 1)
            q, k, v = (_heads(attn, to(both)) for to in (attn.to_q, attn.to_k, attn.to_v))
            q, k = _normed(attn.norm_q, q), _normed(attn.norm_k, k)
            (q, q_text), (k, k_text), (v, v_text) = ((x[:, :video], x[:, video:]) for x in (q, k, v))
        else:
            q, k, v = (_heads(attn, to(hidden_states)) for to in (attn.to_q, attn.to_k, attn.to_v))
            q, k = _normed(attn.norm_q, q), _normed(attn.norm_k, k)
            added = (attn.add_q_proj, attn.add_k_proj, attn.add_v_proj)
            q_text, k_text, v_text = (_heads(attn, to(encoder_hidden_states)) for to in added)
            q_text, k_text = _normed(attn.norm_added_q, q_text), _normed(attn.norm_added_k, k_text)
        if image_rotary_emb is not None:
            q, k = (apply_rotary_emb(x, image_rotary_emb, sequence_dim=1) for x in (q, k))

        mask = key_mask(attention_mask, q.shape[0], video + q_text.shape[1])  # the model hides padded text only
        joint = Joint(q_text, k_text, v_text, "rear", None if mask is None else mask[:, video:])
        out, text_out = self.beside(q, k, v, joint, None)
        out, text_out = out.flatten(2), text_out.flatten(2)
        if getattr(attn, "to_out", None) is not None:
            out = attn.to_out[1](attn.to_out[0](out))
        if getattr(attn, "to_add_out", None) is not None:
            text_out = attn.to_add_out(text_out)
        return out, text_out


class HunyuanVideoSeams(Seams):
    """The model sees a clip of s frames of one patch each: this rank's tokens, one after the other."""

    stock = ("HunyuanVideoAttnProcessor2_0",)

    def __init__(self, model: Any, place: Place, pipe: Pipe | None = None) -> None:
        super().__init__(model, place, pipe)
        config = model.config
        self.patch = (config.patch_size_t, config.patch_size, config.patch_size)
        self.sizes = torch.Size(())
        self.blocks = [*model.transformer_blocks, *model.single_transformer_blocks]

    def processors(self) -> dict[str, Any]:
        of_blocks = {id(block.attn) for block in self.blocks}
        names = [name for name, module in self.model.named_modules() if id(module) in of_blocks]
        return {name: HunyuanVideoProcessor(self.shared) for name in names}

    def hooks(self) -> list[RemovableHandle]:
        rope = self.model.rope
        result = [rope.register_forward_pre_hook(self._whole_grid), rope.register_forward_hook(self._cut_rope)]
        if self.model.config.image_condition_type == "token_replace":
            result += [block.register_forward_pre_hook(self._own_first_frame) for block in self.blocks]
        return result

    @property
    def grid(self) -> tuple[int, int, int]:
        """Patches along frames, rows and columns; the model drops what does not fill a patch."""
        T, Y, X = (size // step for size, step in zip(self.sizes[2:], self.patch, strict=True))
        return T, Y, X

    def scatter(self, given: dict[str, Any]) -> dict[str, Any]:
        latents = given["hidden_states"]
        self.sizes = latents.shape
        (T, Y, X), (t, y, x) = self.grid, self.patch
        shard = self.shared.begin(T * Y * X)
        patches = latents[:, :, : T * t, : Y * y, : X * x]
        patches = patches.unflatten(4, (X, x)).unflatten(3, (Y, y)).unflatten(2, (T, t))
        tokens = patches.permute(0, 2, 4, 6, 1, 3, 5, 7).flatten(1, 3)  # (B, S, C, t, y, x)
        return given | {"hidden_states": shard.scatter(tokens).transpose(1, 2).flatten(2, 3)}

    def gather(self, sample: Tensor) -> Tensor:
        (T, Y, X), (t, y, x) = self.grid, self.patch
        own_BsC = sample.unflatten(2, (-1, t)).transpose(1, 2).flatten(2)
        all_BSC = self.shared.shard.gather(own_BsC)
        patches: Tensor = all_BSC.unflatten(2, (-1, t, y, x)).unflatten(1, (T, Y, X))
        return patches.permute(0, 4, 1, 5, 2, 6, 3, 7).reshape(-1, patches.shape[4], T * t, Y * y, X * x)

    def _whole_grid(self, module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        """The table reads nothing but a shape and a device."""
        return (args[0].new_empty(()).expand(self.sizes),)

    def _cut_rope(self, module: Any, args: Any, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        shard = self.shared.shard
        return shard.scatter(rope[0], 0), shard.scatter(rope[1], 0)

    def _own_first_frame(self, module: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """How many of this rank's tokens belong to the first frame, which an image has replaced."""
        _, Y, X = self.grid
        shard = self.shared.shard
        assert isinstance(shard, TokenShard), "no pipeline"
        span = shard.span
        return (*args[:-1], min(max(Y * X - span.start, 0), span.size))


def _heads(attn: Any, x_BSD: Tensor) -> Tensor:
    x_BSHK: Tensor = x_BSD.unflatten(2, (attn.heads, -1))
    return x_BSHK


def _normed(norm: Any, x_BSHK: Tensor) -> Tensor:
    return x_BSHK if norm is None else norm(x_BSHK)
