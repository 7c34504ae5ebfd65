"""What the ranks do in the test of LoRA adapters."""

from __future__ import annotations

import torch
from dropin_models import Call, build
from dropin_work import enable, off
from peft import LoraConfig

import diptych.diffusers
from diptych.parallel import Layout

BLOCKS = r".*transformer_blocks.*(to_q|to_k|to_v|add_k_proj|to_out\.0|to_add_out)"
TARGETS = {
    "kandinsky6": r".*(to_query|to_key|to_value|\.out_layer|in_layer|feed_forward\.net\.2)",
    "flux": BLOCKS + r"|.*proj_out|x_embedder|context_embedder",
    "hunyuan": BLOCKS + r"|proj_out|x_embedder\.proj",
}
"""Also the layers beside the cuts: the first and the last."""


@torch.no_grad()
def adapted(layout: Layout, call: Call) -> dict[str, float]:
    """A model that gets an adapter while split, one that has it before, and one that loses it."""
    model = build(call.model)

    def velocity() -> torch.Tensor:
        return model(**call.arguments(), return_dict=False)[0]

    plain = velocity()
    enable(model, layout)
    torch.manual_seed(3)
    model.add_adapter(LoraConfig(r=2, target_modules=TARGETS[call.model], init_lora_weights=False))
    added_after = velocity()
    diptych.diffusers.disable(model)
    expected = velocity()
    enable(model, layout)
    added_before = velocity()
    model.disable_adapters()
    without = velocity()
    return {
        "matters": off(expected, plain),
        "added after": off(added_after, expected),
        "added before": off(added_before, expected),
        "switched off": off(without, plain),
    }
