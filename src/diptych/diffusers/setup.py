"""Switching context parallelism on and off, all or nothing."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, FirstBlockCacheConfig, ParallelConfig
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from diptych.attention import Place
from diptych.attention.collectives import start_all_gather
from diptych.diffusers.backends import check_backend
from diptych.diffusers.models import MODELS
from diptych.diffusers.pipeline import Pipe, Staged
from diptych.diffusers.seams import Seams, changed, joined
from diptych.errors import LayoutError
from diptych.parallel import Layout
from diptych.parallel.patches import PatchShard
from diptych.parallel.stages import Stages

_KEY = "_diptych_split"
"""The attribute of a model that holds its `Split`."""


def parallelize(
    model: Any,
    layout: Layout | str,
    mesh: DeviceMesh | None = None,
    *,
    warmup: int | None = None,
    patches: int | None = None,
) -> None:
    """Split the tokens of a stock diffusers model over ranks, or its blocks; every rank calls it.

    model: of a class in `MODELS`, also behind `torch.compile`. layout: `ring=2,ulysses=2`; `single` splits nothing and
    needs no process group. mesh: over more ranks than the layout's, with dimensions `ring` and `ulysses` (in this
    order) of the layout's sizes, and `pipeline` before them where the layout has stages; without it all running ranks
    are used.

    `pipeline=P` splits the blocks: PipeFusion, an approximation after the first `warmup` steps (default 2) of a
    request, in which the `patches` (default 2P) of the sequence see those behind them as they were a step before.

    From then on a forward takes on every rank the arguments that it would take in one process, equal on all ranks, and
    returns on every rank what it would return in one process.

    Raises `LayoutError` for a model, layout or mesh that does not fit, or a model that is split already; `KernelError`
    for an attention backend that cannot be split. The model is then as it was.
    """
    model = _unwrapped(model)
    layout = Layout.parse(layout) if isinstance(layout, str) else layout
    seams_class = _seams_of(model)
    if layout.cfg > 1:
        raise LayoutError(
            f"layout cfg = {layout.cfg} is not accepted here: a diffusers pipeline computes both passes of guidance in "
            "every process; use ring and ulysses."
        )
    for name in ("tensor", "shard"):
        if getattr(layout, name) > 1:
            raise LayoutError(f"layout {name} = {getattr(layout, name)} is not accepted here: use ring and ulysses.")
    _check_pipeline(model, layout, seams_class, warmup, patches)
    if getattr(model, _KEY, None) is not None or model._parallel_config is not None:
        raise LayoutError(
            f"this {type(model).__name__} is parallel already: call diptych.diffusers.disable(model) first."
        )
    _check_cache(model)
    check_processors(model, seams_class(model, Place()))
    place, stages = _place(model, layout, mesh)
    pipe = None if layout.pipeline == 1 else Pipe(stages, warmup or 2, patches or 2 * layout.pipeline)
    Split(model, seams_class(model, place, pipe), layout)


def disable(model: Any) -> None:
    """Undo `parallelize` or `enable_parallelism`. Raises `LayoutError` if neither was called."""
    model = _unwrapped(model)
    split = getattr(model, _KEY, None)
    if split is None:
        raise LayoutError(f"this {type(model).__name__} is not parallel: there is nothing to disable.")
    split.undo()


def adopt(cls: Any) -> None:
    """Give a model class an `enable_parallelism` that splits by `parallelize`; what ours does not do stays stock."""
    stock = cls.enable_parallelism

    def enable_parallelism(self: Any, *, config: Any, cp_plan: Any = None) -> None:
        context = config.context_parallel_config if isinstance(config, ParallelConfig) else config
        if cp_plan is not None or not isinstance(context, ContextParallelConfig):
            stock(self, config=config, cp_plan=cp_plan)
            return
        parallelize(self, Layout(ring=context.ring_degree, ulysses=context.ulysses_degree), context.mesh)

    enable_parallelism.__doc__ = stock.__doc__
    cls.enable_parallelism = enable_parallelism


class Split:
    """A model that is split: its seams, and the way back."""

    def __init__(self, model: Any, seams: Seams, layout: Layout) -> None:
        self.model, self.seams = model, seams
        self.names = tuple(inspect.signature(type(model).forward).parameters)[1:]
        self.handles: list[Any] = []
        self.agreed: set[torch.Size] = set()
        self.pipe = seams.shared.pipe
        self.staged: Staged | None = None
        self.processors: dict[str, Any] = {}
        self.before: dict[str, Any] = {}
        _forget_compiled()
        try:
            if self.pipe is not None:
                assert seams.piped is not None
                self.staged = Staged(model, seams.piped(), self.pipe)
            self.processors = seams.processors()
            self.before = {name: model.get_submodule(name).processor for name in self.processors}
            for name, processor in self.processors.items():
                processor._attention_backend = self.before[name]._attention_backend
                model.get_submodule(name).set_processor(processor)
            self.handles += seams.hooks()
            self.handles.append(model.register_forward_pre_hook(self._scatter, with_kwargs=True))
            self.handles.append(model.register_forward_hook(self._gather))
            context = None
            if layout.sequence > 1:
                context = ContextParallelConfig(ring_degree=layout.ring, ulysses_degree=layout.ulysses)
            model._parallel_config = ParallelConfig(context_parallel_config=context)
            setattr(model, _KEY, self)
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        for handle in self.handles:
            handle.remove()
        for name, stock in self.before.items():
            module = self.model.get_submodule(name)
            if module.processor is self.processors[name]:
                stock._attention_backend = module.processor._attention_backend
                module.set_processor(stock)
        if self.staged is not None:
            self.staged.undo()
        self.model._parallel_config = None
        setattr(self.model, _KEY, None)
        _forget_compiled()

    def _scatter(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        given = dict(zip(self.names, args, strict=False)) | kwargs
        if not torch.compiler.is_compiling():
            self._check()
            self._agree(given["hidden_states"])
        if self.staged is not None:
            self.staged.check()
        cut = self.seams.scatter(given)
        if self.pipe is not None and self.staged is not None:
            shard = self.seams.shared.shard
            assert isinstance(shard, PatchShard)
            self.staged.shard = shard
            self.pipe.begin(given["timestep"], given["hidden_states"].shape)
        return (), cut

    def _gather(self, model: Any, args: Any, output: Any) -> Any:
        pipe = self.pipe
        if pipe is not None:
            output = changed(output, lambda x: pipe.stages.from_last([x])[0])
        return joined(output, self.seams.gather(output[0]))

    def _agree(self, latents: Tensor) -> None:
        """Compare the ranks' latents once a shape: a forgotten seed would give a mixture of several clips, silently."""
        groups = [self.seams.shared.place.sequence, None if self.pipe is None else self.pipe.stages.group]
        several = [group for group in groups if group is not None and group.size > 1]
        if not several or latents.shape in self.agreed:
            return
        wide = latents.float()
        own = torch.stack([wide.sum(), wide.square().sum()]).nan_to_num()
        apart = own.new_zeros(1)
        for group in several:  # the second tells all what the first has found
            of_ranks_R3 = start_all_gather(torch.cat([own, apart])[None], group).wait()
            apart = ((of_ranks_R3[:, :2] != own).any() | of_ranks_R3[:, 2].any()).to(own.dtype)[None]
        if bool(apart):
            raise LayoutError(
                "the ranks were given different latents: call the pipeline on every rank with "
                "generator=torch.Generator().manual_seed(seed) and the same seed."
            )
        self.agreed.add(latents.shape)

    def _check(self) -> None:
        """What a user may have changed since. Raises before anything is sent."""
        _check_cache(self.model)
        for name, processor in self.processors.items():
            now = self.model.get_submodule(name).processor
            if now is not processor:
                raise LayoutError(
                    f"the attention processor of {name} is {type(now).__name__} now, which is not split: call "
                    "diptych.diffusers.disable(model) before changing processors."
                )
        for backend in {processor._attention_backend for processor in self.processors.values()}:
            check_backend(backend)


def check_processors(model: Any, seams: Seams) -> None:
    """Raises `LayoutError` or `KernelError` if an attention works in a way that cannot be split."""
    for name in seams.processors():
        processor = model.get_submodule(name).processor
        if type(processor).__name__ not in seams.stock:
            raise LayoutError(
                f"attention processor {type(processor).__name__} of {name} is not accepted: {', '.join(seams.stock)}."
            )
        check_backend(processor._attention_backend)


def _check_cache(model: Any) -> None:
    if isinstance(getattr(model, "_cache_config", None), FirstBlockCacheConfig):
        raise LayoutError(
            "FirstBlockCache is not accepted on a model that is split: each rank would decide by its own tokens; "
            "call model.disable_cache()."
        )


def _seams_of(model: Any) -> type[Seams]:
    for cls, seams in MODELS.items():
        if isinstance(model, cls):
            return seams
    known = ", ".join(cls.__name__ for cls in MODELS)
    raise LayoutError(f"model {type(model).__name__} is not accepted: one of {known}.")


def _check_pipeline(model: Any, layout: Layout, seams: type[Seams], warmup: int | None, patches: int | None) -> None:
    """Raises `LayoutError` for stages that the model cannot have, or settings without stages."""
    for name, value in (("warmup", warmup), ("patches", patches)):
        if value is None:
            continue
        if layout.pipeline == 1:
            raise LayoutError(f"{name} = {value!r} is not accepted with layout {layout}: it goes with pipeline=2.")
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1000:
            raise LayoutError(f"{name} = {value!r} is not accepted: a whole number from 1 to 1000.")
    if layout.pipeline == 1:
        return
    if seams.piped is None:
        able = ", ".join(cls.__name__ for cls, of_class in MODELS.items() if of_class.piped is not None)
        raise LayoutError(
            f"layout pipeline = {layout.pipeline} is not accepted for {type(model).__name__}: PipeFusion is there for "
            f"{able}; use ring and ulysses."
        )
    count = sum(len(getattr(model, name)) for name in seams.piped.lists)
    if layout.pipeline > count:
        raise LayoutError(
            f"layout pipeline = {layout.pipeline} is not accepted: the model has {count} blocks to split."
        )


def _place(model: Any, layout: Layout, mesh: DeviceMesh | None) -> tuple[Place, Stages]:
    if mesh is None:
        if layout.world == 1:
            return Place(), Stages()
        if not dist.is_initialized():
            raise LayoutError(
                f"layout {layout} needs a process group of {layout.world} ranks, and none is running: start the script "
                "with torchrun and call torch.distributed.init_process_group first."
            )
        mesh = layout.mesh(_device_type(model))
        return Place.from_mesh(mesh), Stages.from_mesh(mesh)
    names = mesh.mesh_dim_names or ()
    sizes = tuple(mesh.size(names.index(name)) if name in names else 1 for name in ("ring", "ulysses"))
    if sizes != (layout.ring, layout.ulysses):
        raise LayoutError(
            f"mesh with ring = {sizes[0]} and ulysses = {sizes[1]} is not accepted for layout {layout}: the degrees "
            "must be the mesh's sizes."
        )
    if layout.pipeline == 1:
        return Place.from_mesh(mesh), Stages()
    if "pipeline" not in names or mesh.size(names.index("pipeline")) != layout.pipeline:
        raise LayoutError(f"a mesh for layout {layout} needs a dimension pipeline of {layout.pipeline} ranks.")
    return Place.from_mesh(mesh), Stages.from_mesh(mesh)


def _device_type(model: Any) -> str:
    """Of the model; of the process group while the model still waits on the CPU."""
    device = str(model.device.type)
    group = dist.group.WORLD
    assert group is not None
    if device == "cpu" and torch.device("cpu") not in group._device_types:
        return str(group._device_types[0].type)
    return device


def _unwrapped(model: Any) -> Any:
    return getattr(model, "_orig_mod", model)


def _forget_compiled() -> None:
    """Compiled graphs do not look again for hooks: without this they would go on as before."""
    torch.compiler.reset()
