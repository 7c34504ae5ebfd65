"""PipeFusion of stock models: on ranks, and the same staleness in one process, written down plainly."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from dropin_models import Call, build, draw
from dropin_work import mesh_of
from errors_work import told
from torch import Tensor, nn

import diptych.diffusers
from diptych.attention.plan import spans, split
from diptych.parallel import Layout

TIMES = (0.9, 0.6, 0.2)
PASSES = 2
"""Of guidance, in each step."""


def arguments(call: Call, step: int, lane: int) -> dict[str, Any]:
    """Other latents in every step, other text in every pass."""
    given = call.arguments()
    given["hidden_states"] = draw(20 + step, *given["hidden_states"].shape)
    given["encoder_hidden_states"] = draw(40 + lane, *given["encoder_hidden_states"].shape)
    given["timestep"] = torch.full_like(given["timestep"], TIMES[step] * (1000 if "kandinsky" in call.model else 1))
    return given


def every(call: Call, run: Callable[[dict[str, Any], int, int], Any]) -> list[list[Tensor]]:
    return [list(run(arguments(call, s, lane), s, lane)) for s in range(len(TIMES)) for lane in range(PASSES)]


@torch.no_grad()
def exact(call: Call) -> list[list[Tensor]]:
    model = build(call.model)
    return every(call, lambda given, step, lane: model(**given, return_dict=False))


@torch.no_grad()
def piped(layout: Layout, call: Call, warmup: int, patches: int) -> dict[str, Any]:
    """What the stages return, twice; and what disable() leaves."""
    model = build(call.model)
    stock = model(**call.arguments(), return_dict=False)
    whole = set(model.state_dict())
    diptych.diffusers.parallelize(model, layout, mesh_of(layout), warmup=warmup, patches=patches)
    held = set(model.state_dict())
    runs = [every(call, lambda given, step, lane: model(**given, return_dict=False)) for _ in range(2)]
    diptych.diffusers.disable(model)
    again = model(**call.arguments(), return_dict=False)
    return {
        "runs": runs,
        "held": held,
        "undone": set(model.state_dict()) == whole
        and all(torch.equal(a, b) for a, b in zip(stock, again, strict=True)),
    }


@torch.no_grad()
def refused_forwards(layout: Layout) -> list[str]:
    """What is told to a ControlNet, a mask, and compiled blocks."""
    model = build("flux")
    diptych.diffusers.parallelize(model, layout, mesh_of(layout))
    sentences = [
        told(lambda call=call: model(**call.arguments()))
        for call in (Call("flux", controlnet=True), Call("flux", hidden_text=2))
    ]
    model.compile_repeated_blocks(backend="eager")
    return [*sentences, told(lambda: model(**Call("flux").arguments()))]


class Remembering:
    """Stands for the attention of a stock model: fresh keys of the rows computed now, remembered ones of the rest."""

    def __init__(self) -> None:
        self.keys: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        self.rows = torch.arange(0)
        self.lane = self.calls = 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, attn_mask: Any = None, **more: Any) -> Tensor:
        self.calls += 1
        if k.shape[1] == len(self.rows):  # those of the split tokens; no other keys are as many
            kept = self.keys.setdefault((self.lane, self.calls), (k.clone(), v.clone()))
            for old, new in zip(kept, (k, v), strict=True):
                old[:, self.rows] = new
            k, v = kept
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first).transpose(1, 2)


class PatchByPatch(nn.Module):
    """All blocks on all patches, one patch after the other."""

    def __init__(self, blocks: list[nn.Module], attention: Remembering) -> None:
        super().__init__()
        self.blocks, self.attention, self.patches = blocks, attention, 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.kandinsky6(*args) if args else self.flux(**kwargs)

    def each(self, tokens: int) -> list[slice]:
        return [slice(span.start, span.stop) for span in spans(split(tokens, self.patches))]

    def kandinsky6(self, vis: Tensor, aud: Tensor, *rest: Any) -> Any:
        text_v, text_a, times, vis_rope, *after = rest
        out = []
        for rows in self.each(vis.shape[1]):
            self.attention.rows, self.attention.calls = torch.arange(vis.shape[1])[rows], 0
            v, a = vis[:, rows], aud
            for block in self.blocks:
                v, a = block(v, a, text_v, text_a, times, vis_rope[rows], *after)
            out.append(v)
        return torch.cat(out, 1), a

    def flux(self, hidden_states: Tensor, encoder_hidden_states: Tensor, image_rotary_emb: Any, **rest: Any) -> Any:
        L, out, text = encoder_hidden_states.shape[1], [], encoder_hidden_states
        for number, rows in enumerate(self.each(hidden_states.shape[1])):
            image, beside = hidden_states[:, rows], encoder_hidden_states if number == 0 else text[:, :0]
            own = (torch.arange(hidden_states.shape[1]) + L)[rows]
            self.attention.rows = torch.cat([torch.arange(L), own]) if number == 0 else own
            self.attention.calls = 0
            rope = tuple(x[self.attention.rows] for x in image_rotary_emb)
            for block in self.blocks:
                beside, image = block(hidden_states=image, encoder_hidden_states=beside, image_rotary_emb=rope, **rest)
            text = beside if number == 0 else text
            out.append(image)
        return text, torch.cat(out, 1)


@torch.no_grad()
def simulated(call: Call, warmup: int, patches: int) -> list[list[Tensor]]:
    """The staleness of PipeFusion in one process."""
    model, attention = build(call.model), Remembering()
    names = ["visual_transformer_blocks"] if "kandinsky" in call.model else []
    names = names or ["transformer_blocks", "single_transformer_blocks"]
    one = PatchByPatch([block for name in names for block in getattr(model, name)], attention)
    for name in names:
        setattr(model, name, nn.ModuleList([one] if name == names[0] else []))

    def run(given: dict[str, Any], step: int, lane: int) -> Any:
        attention.lane, one.patches = lane, 1 if step < warmup else patches
        return model(**given, return_dict=False)

    module = sys.modules[type(model).__module__]
    with patch.object(module, "dispatch_attention_fn", attention):
        return every(call, run)
