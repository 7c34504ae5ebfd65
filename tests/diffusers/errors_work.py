"""What the ranks do in the tests of refusals."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig
from dropin_models import Call, build, draw
from dropin_work import enable, mesh_of

import diptych.diffusers
from diptych.errors import UserError
from diptych.parallel import Layout


def state(model: Any) -> tuple[Any, ...]:
    """All that splitting a model changes."""
    modules = list(model.named_modules())
    hooks = [(name, len(m._forward_hooks), len(m._forward_pre_hooks)) for name, m in modules]
    processors = [(name, id(m.processor)) for name, m in modules if hasattr(m, "processor")]
    return hooks, processors, model._parallel_config, model.__dict__.get("_diptych_split")


def told(what: Any) -> str:
    try:
        what()
    except UserError as error:
        return str(error)
    return ""


def refused(degrees: dict[str, int], layout: Layout) -> tuple[list[str], bool]:
    """Degrees for more ranks than there are, or other than the mesh's."""
    model = build("flux")
    before = state(model)
    without_mesh = told(lambda: model.enable_parallelism(config=ContextParallelConfig(**degrees)))
    config = ContextParallelConfig(**degrees, mesh=mesh_of(layout))
    with_mesh = told(lambda: model.enable_parallelism(config=config))
    return [without_mesh, with_mesh], state(model) == before


def too_few_tokens(layout: Layout) -> str:
    model = build("hunyuan")
    enable(model, layout)
    with torch.no_grad():
        return told(lambda: model(**Call("hunyuan", grid=(1, 1, 2)).arguments()))


def switched(layouts: list[Layout]) -> list[str]:
    """One model, several configurations, the second of them too early."""
    model = build("flux")
    results = []
    for layout in layouts:
        enable(model, layout)
        results.append(told(lambda layout=layout: enable(model, layout)))
        diptych.diffusers.disable(model)
    return results


def seeds(layout: Layout, same: bool) -> str:
    """A forward on latents that each rank has drawn itself."""
    model, call = build("flux"), Call("flux").arguments()
    enable(model, layout)
    call["hidden_states"] = draw(0 if same else dist.get_rank(), *call["hidden_states"].shape)
    with torch.no_grad():
        return told(lambda: model(**call))
