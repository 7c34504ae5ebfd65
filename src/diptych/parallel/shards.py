"""Weights of the blocks in pieces on several ranks: FSDP2 gathers a block before it runs, and the next one meanwhile.

Nothing of the arithmetic changes. Modulations are left out: their results are gathered instead (`parallel.tensor`), and
all outside the blocks, which is small, is on every rank. FSDP2 takes a second to import, so only who needs this module
imports it, with the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Shard
from torch.nn.functional import pad

from diptych.model.fp8 import Fp8Linear
from diptych.model.layers import Modulation
from diptych.model.loading import Cut, place_plain
from diptych.model.ops import to_rows
from diptych.model.transformer import Transformer
from diptych.parallel.tensor import Cuts


class Shards:
    """The blocks of a transformer on meta, in pieces over a mesh of one dimension.

    Load with `cuts` and `place`, then call `ready`; all ranks of the mesh do so together.
    """

    def __init__(self, model: Transformer, mesh: DeviceMesh, cuts: Mapping[str, Sequence[Cut]]) -> None:
        self.model, self.mesh = model.requires_grad_(False), mesh
        self.cuts: Cuts = {name: list(of) for name, of in cuts.items()}
        self._scales: list[Fp8Linear] = []
        towers = [block for tower in model.text_towers for block in tower]
        self._blocks: list[nn.Module] = [*towers, *model.held_blocks]
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for block in self._blocks:
            kept = set(_modulations(block))
            for parameter in block.parameters():
                if parameter not in kept:
                    self.cuts.setdefault(names[id(parameter)], []).append((0, *self._rows(len(parameter))))
            fully_shard(block, mesh=mesh, reshard_after_forward=True, ignored_params=kept)

    def place(self, module: nn.Module, name: str, tensor: Tensor) -> None:
        """Put this rank's piece of a parameter in its place; with fp8, quantised."""
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        whole: Any = owner._parameters.get(leaf)
        if not isinstance(whole, DTensor):
            place_plain(module, name, tensor)
            return
        if isinstance(owner, Fp8Linear) and leaf == "weight":
            owner.dtype = tensor.dtype
            tensor, owner.weight_scale = to_rows(tensor)
            self._scales.append(owner)
        piece = DTensor.from_local(
            tensor, self.mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
        owner._parameters[leaf] = nn.Parameter(piece, requires_grad=False)

    def ready(self) -> None:
        """After loading: gather the scales of fp8 weights, which are small, and set up the prefetch."""
        for layer in self._scales:
            layer.weight_scale = self._gather_rows(layer.weight_scale, layer.out_features).reshape(1, -1)
        # One root for all blocks: they share its streams. It runs through two methods, and owns nothing itself.
        fully_shard(self.model, mesh=self.mesh, ignored_params=set(_outside(self.model, self._blocks)))
        for method in ("embed", "blocks"):
            register_fsdp_forward_method(self.model, method)
        for block, following in pairwise(self._blocks):
            assert isinstance(block, FSDPModule) and isinstance(following, FSDPModule)
            block.set_modules_to_forward_prefetch([following])

    def _rows(self, rows: int) -> tuple[int, int]:
        """This rank's rows, as FSDP2 deals them: all ranks but the last ones have as many."""
        each = -(-rows // self.mesh.size())
        start = min(self.mesh.get_local_rank() * each, rows)
        return start, min(start + each, rows)

    def _gather_rows(self, scale: Tensor, rows: int) -> Tensor:
        each = -(-rows // self.mesh.size())
        mine = pad(scale.reshape(-1), (0, each - scale.numel()))
        whole = mine.new_empty(each * self.mesh.size())
        dist.all_gather_into_tensor(whole, mine, group=self.mesh.get_group())
        return whole[:rows]


def _modulations(block: nn.Module) -> Iterator[nn.Parameter]:
    for module in block.modules():
        if isinstance(module, Modulation):
            yield from module.parameters()


def _outside(model: nn.Module, blocks: Sequence[nn.Module]) -> Iterator[nn.Parameter]:
    """Parameters of no block, and the modulations of all."""
    sharded = {id(p) for block in blocks for p in block.parameters() if isinstance(p, DTensor)}
    return (p for p in model.parameters() if id(p) not in sharded)
