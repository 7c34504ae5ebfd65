"""Tiny stock models of every class the drop-in knows, and calls for them; the same on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from diffusers import FluxTransformer2DModel, HunyuanVideoTransformer3DModel, Kandinsky6Transformer3DModel
from torch import Tensor, nn

from diptych.model.config import TINY


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def alive(model: nn.Module, seed: int = 0) -> Any:
    """Weights large enough that every block, gate and norm shows in the output."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim > 1:
            parameter.data = drawn * parameter[0].numel() ** -0.5
        elif name.endswith("weight"):
            parameter.data = 1 + 0.1 * drawn
        else:
            parameter.data = 0.1 * drawn
    return model.eval()


@dataclass(frozen=True)
class Call:
    """One forward: what is asked of which model."""

    model: str
    batch: int = 1
    grid: tuple[int, int, int] = (3, 3, 5)
    text: int = 7
    hidden_text: int = 0
    audio: int = 0
    image: bool = False
    guidance: bool = False
    controlnet: bool = False

    def arguments(self) -> dict[str, Any]:
        family = self.model.split("-")[0]
        return {"kandinsky6": kandinsky6_call, "flux": flux_call, "hunyuan": hunyuan_call}[family](self)


def build(name: str) -> Any:
    torch.manual_seed(0)
    return alive(BUILDERS[name]())


def kandinsky6_model() -> Any:
    return Kandinsky6Transformer3DModel(**TINY.to_dict())


def short_model() -> Any:
    """As many blocks as compiling needs to show that blocks share a graph."""
    return Kandinsky6Transformer3DModel(**TINY.to_dict() | {"num_visual_blocks": 2, "num_text_blocks": 1})


def distilled_model() -> Any:
    return Kandinsky6Transformer3DModel(**TINY.distilled().to_dict())


def flux_model(guidance: bool = False, blocks: int = 2) -> Any:
    """5 heads of 8: nothing divides."""
    return FluxTransformer2DModel(
        in_channels=8,
        num_layers=blocks,
        num_single_layers=blocks,
        attention_head_dim=8,
        num_attention_heads=5,
        joint_attention_dim=24,
        pooled_projection_dim=16,
        axes_dims_rope=(2, 2, 4),
        guidance_embeds=guidance,
    )


def hunyuan_model(condition: str | None = None, guidance: bool = True, blocks: int = 2) -> Any:
    """3 heads of 8."""
    return HunyuanVideoTransformer3DModel(
        in_channels=9 if condition == "latent_concat" else 4,
        out_channels=4,
        num_attention_heads=3,
        attention_head_dim=8,
        num_layers=blocks,
        num_single_layers=blocks,
        num_refiner_layers=1,
        text_embed_dim=20,
        pooled_projection_dim=16,
        rope_axes_dim=(2, 2, 4),
        guidance_embeds=guidance,
        image_condition_type=condition,
    )


BUILDERS: dict[str, Any] = {
    "kandinsky6": kandinsky6_model,
    "kandinsky6-short": short_model,
    "kandinsky6-distilled": distilled_model,
    "flux": flux_model,
    "flux-guidance": lambda: flux_model(True),
    "flux-short": lambda: flux_model(blocks=1),
    "hunyuan": hunyuan_model,
    "hunyuan-short": lambda: hunyuan_model(blocks=1),
    "hunyuan-concat": lambda: hunyuan_model("latent_concat", False),
    "hunyuan-replace": lambda: hunyuan_model("token_replace"),
}


def text_mask(call: Call) -> Tensor:
    """The last entry of the batch has a shorter text."""
    mask = torch.ones(call.batch, call.text, dtype=torch.bool)
    mask[-1, call.text - call.hidden_text :] = False
    return mask


def kandinsky6_call(call: Call) -> dict[str, Any]:
    (T, Y, X), B = call.grid, call.batch
    T += call.image
    given: dict[str, Any] = {
        "hidden_states": draw(1, B, T, 2 * Y, 2 * X, 33),
        "encoder_hidden_states": draw(2, B, call.text, TINY.in_text_dim),
        "pooled_projections": draw(3, B, TINY.in_text_dim2),
        "timestep": torch.full((B,), 321.0),
    }
    if call.audio:
        given["audio_hidden_states"] = draw(4, B, call.audio, TINY.in_audio_dim)
    if call.image:
        given["visual_rope_pos"] = (torch.tensor([*range(T - 1), 0]), torch.arange(Y), torch.arange(X))
        given["visual_token_type_ids"] = torch.tensor([[0] * (T - 1) + [1]] * B)
    if call.hidden_text:
        given["encoder_attention_mask"] = text_mask(call)
    return given


def flux_call(call: Call) -> dict[str, Any]:
    (_, Y, X), B = call.grid, call.batch
    rows, columns = torch.meshgrid(torch.arange(Y), torch.arange(X), indexing="ij")
    ids = torch.stack([torch.zeros(Y * X), rows.flatten(), columns.flatten()], 1)
    given: dict[str, Any] = {
        "hidden_states": draw(1, B, Y * X, 8),
        "encoder_hidden_states": draw(2, B, call.text, 24),
        "pooled_projections": draw(3, B, 16),
        "timestep": torch.full((B,), 0.7),
        "img_ids": ids,
        "txt_ids": torch.zeros(call.text, 3),
    }
    if call.guidance:
        given["guidance"] = torch.full((B,), 3.5)
    if call.hidden_text:
        mask = torch.cat([text_mask(call), torch.ones(B, Y * X, dtype=torch.bool)], 1)
        given["joint_attention_kwargs"] = {"attention_mask": mask[:, None, None]}
    if call.controlnet:
        given["controlnet_block_samples"] = [draw(5, B, Y * X, 40)]
        given["controlnet_single_block_samples"] = [draw(6, B, Y * X, 40)]
    return given


def hunyuan_call(call: Call) -> dict[str, Any]:
    (T, Y, X), B = call.grid, call.batch
    given: dict[str, Any] = {
        "hidden_states": draw(1, B, 9 if call.model.endswith("concat") else 4, T, 2 * Y, 2 * X),
        "timestep": torch.full((B,), 500),
        "encoder_hidden_states": draw(2, B, call.text, 20),
        "encoder_attention_mask": text_mask(call),
        "pooled_projections": draw(3, B, 16),
    }
    if not call.model.endswith("concat"):
        given["guidance"] = torch.full((B,), 6000.0)
    return given
