"""Stock diffusers on the weights of one of our models: the other side of a comparison, at no further memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from diptych.bench.geometry import Inputs
from diptych.model.transformer import Transformer

if TYPE_CHECKING:
    from diffusers import Kandinsky6Transformer3DModel

PADDED_TEXT = 1024
"""Text tokens of a forward as diffusers' pipeline calls it: padded, with a mask."""


def stock_transformer(model: Transformer) -> Kandinsky6Transformer3DModel:
    """diffusers' transformer with the very tensors of `model`.

    Only the small embedding layers are copies, in the working dtype, as diffusers' loader makes them. Modulation stays
    as it is stored: its modules follow the dtype of their weights.
    """
    from diffusers import Kandinsky6Transformer3DModel
    from diffusers.models.transformers.transformer_kandinsky6 import Kandinsky6RoPE1D, Kandinsky6RoPE3D

    config = model.config
    with torch.device("meta"):
        stock = Kandinsky6Transformer3DModel(**config.to_dict())
    weights = {
        name: value.to(model.dtype) if "_embeddings." in name and "time_embeddings" not in name else value
        for name, value in model.state_dict().items()
    }
    stock.load_state_dict(weights, strict=True, assign=True)
    device = next(iter(weights.values())).device
    # The rotary tables are buffers that no checkpoint holds, so they are still on meta.
    stock.visual_rope_embeddings = Kandinsky6RoPE3D(config.axes_dims).to(device)
    stock.video_text_rope_embeddings = Kandinsky6RoPE1D(config.head_dim).to(device)
    stock.audio_text_rope_embeddings = Kandinsky6RoPE1D(config.head_dim).to(device)
    stock.audio_rope_embeddings = Kandinsky6RoPE1D(config.head_dim, freqs_scaling=config.audio_freqs_scaling).to(device)
    return stock.eval().requires_grad_(False)


def stock_forward(stock: Any, inputs: Inputs, *, padded: bool) -> Callable[[], tuple[Tensor, ...]]:
    """One forward of `stock`; padded: text filled up to 1,024 tokens behind a mask, as diffusers' pipeline does."""
    text, mask = inputs.text, None
    if padded:
        length = text.shape[1]
        text = torch.nn.functional.pad(text, (0, 0, 0, PADDED_TEXT - length))
        mask = (torch.arange(PADDED_TEXT, device=text.device) < length)[None]

    @torch.no_grad()
    def call() -> tuple[Tensor, ...]:
        out: tuple[Tensor, ...] = stock(
            inputs.video,
            text,
            inputs.pooled,
            inputs.timestep,
            inputs.audio,
            encoder_attention_mask=mask,
            return_dict=False,
        )
        return out

    return call
