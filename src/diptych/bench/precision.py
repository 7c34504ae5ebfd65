"""fp8 where forwards or steps are timed by themselves: the precision as users write it, and a model in it."""

from __future__ import annotations

from typing import Any

import torch

from diptych.attention import APPROXIMATE, LocalAttend
from diptych.engine.options import pick_precision
from diptych.errors import RequestError
from diptych.memory.fp8 import quantise
from diptych.memory.precision import Precision
from diptych.model.config import TransformerConfig
from diptych.model.transformer import Transformer


def precision_for(text: str, config: TransformerConfig, device: torch.device, dtype: torch.dtype) -> Precision:
    """Raises `RequestError` for one that this device or model cannot have, or that tells steps of a clip apart."""
    precision = pick_precision(text, device, dtype)
    precision.check(config.num_visual_blocks)
    if precision.steps:
        raise RequestError("precision", text, "one without steps, such as fp8:first=2,last=2: here no clip is made")
    return precision


def in_precision(model: Transformer, precision: Precision, device: torch.device) -> dict[str, Any]:
    """Quantise `model` in place; who attends in its blocks, as `Denoiser` and `forward_call` take it."""
    attend = LocalAttend()
    if precision.kind == "fp8":
        quantise(model, exact_first=precision.first, exact_last=precision.last)
        attend = LocalAttend(APPROXIMATE)
    spared = precision.spared(model.config.num_visual_blocks)
    return {"attend": attend, "exact": attend.exact(), "exact_blocks": spared}
