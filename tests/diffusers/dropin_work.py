"""What the ranks do in the tests of the drop-in: the stock model first, then the same model split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from dropin_models import Call, build
from torch import Tensor

import diptych.diffusers
from diptych.parallel import Layout

_meshes: dict[Any, Any] = {}
_models: dict[str, Any] = {}


def mesh_of(layout: Layout) -> Any:
    """One mesh a process group: every new one makes new groups."""
    key = (dist.group.WORLD, layout)
    if key not in _meshes:
        _meshes[key] = layout.mesh("cpu")
    return _meshes[key]


def model_of(name: str) -> Any:
    if name not in _models:
        _models[name] = build(name)
    return _models[name]


def enable(model: Any, layout: Layout) -> None:
    config = ContextParallelConfig(ring_degree=layout.ring, ulysses_degree=layout.ulysses, mesh=mesh_of(layout))
    model.enable_parallelism(config=config)


@torch.no_grad()
def velocities(layout: Layout, calls: Sequence[Call]) -> list[dict[str, Any]]:
    """For each call: how far the split model is from the stock one, and what it returned."""
    results = []
    for call in calls:
        model = model_of(call.model)
        stock = [x.clone() for x in model(**call.arguments(), return_dict=False)]
        enable(model, layout)
        try:
            split = model(**call.arguments(), return_dict=False)
        finally:
            diptych.diffusers.disable(model)
        again = model(**call.arguments(), return_dict=False)
        results.append(
            {
                "off": [off(a, b) for a, b in zip(split, stock, strict=True)],
                "size": [float(x.abs().max()) for x in stock],
                "out": split,
                "undone": all(torch.equal(a, b) for a, b in zip(again, stock, strict=True)),
            }
        )
    return results


def off(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape, f"{tuple(a.shape)}, not {tuple(b.shape)}"
    return float((a - b).abs().max())
