"""What the ranks do in the tests of compiled models."""

from __future__ import annotations

from typing import Any

import torch
from dropin_models import Call, build
from dropin_work import enable, off
from torch._dynamo.utils import counters

import diptych.diffusers
from diptych.parallel import Layout


class Graphs:
    """A backend that runs what is captured as it is, and counts: capturing is what can break."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: Any, example: Any) -> Any:
        self.count += 1
        return graph.forward


@torch.no_grad()
def compiled(layout: Layout, calls: list[Call], whole: bool) -> dict[str, Any]:
    """Graphs, breaks, and how far the compiled, split model is from the eager stock one, call after call."""
    model = build(calls[0].model)
    stock = [model(**call.arguments(), return_dict=False) for call in calls]
    enable(model, layout)
    counters.clear()
    backend = Graphs()
    run = torch.compile(model, fullgraph=True, backend=backend) if whole else model
    if not whole:
        model.compile_repeated_blocks(fullgraph=True, backend=backend)
    graphs, offs = [], []
    for call, expected in zip(calls, stock, strict=True):
        split = run(**call.arguments(), return_dict=False)
        graphs.append(backend.count)
        offs.append([off(a, b) for a, b in zip(split, expected, strict=True)])
    diptych.diffusers.disable(run)
    return {"graphs": graphs, "breaks": sum(counters["graph_break"].values()), "off": offs}


@torch.no_grad()
def compiled_then_switched(layout: Layout, call: Call) -> list[float]:
    """One compiled model that is stock, split, stock again."""
    model = build(call.model)
    expected = model(**call.arguments(), return_dict=False)[0]
    run = torch.compile(model, fullgraph=True, backend="eager")
    offs = []
    for switch in (lambda: None, lambda: enable(model, layout), lambda: diptych.diffusers.disable(run)):
        switch()
        offs.append(off(run(**call.arguments(), return_dict=False)[0], expected))
    return offs
