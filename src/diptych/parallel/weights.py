"""Which ranks share the weights of a rank's blocks: `tensor` splits the arithmetic too, `shard` only where they lie."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from diptych.attention.place import ALONE, Group
from diptych.parallel.layout import Layout


@dataclass(frozen=True)
class WeightSplit:
    """This rank's partners.

    tensor: ranks that compute a part each of every layer. shard: ranks that hold a part each of what all of them
    compute with. spread: both together; over them the rows of the modulations lie. lanes: which pass of guidance each
    rank of `spread` computes.
    """

    tensor: Group = ALONE
    spread: Group = ALONE
    lanes: tuple[int, ...] = (0,)
    shard: DeviceMesh | None = None

    @classmethod
    def of(cls, layout: Layout, device_type: str) -> WeightSplit:
        """Process groups for a layout. All ranks call it together."""
        if layout.tensor == layout.shard == 1:
            return cls()
        tensor, spread, shard = (_mine(list(ranks)) for ranks in (_tensor(layout), _spread(layout), _shard(layout)))
        mesh = DeviceMesh.from_group(shard, device_type) if layout.shard > 1 else None
        half = layout.world // layout.cfg
        lanes = tuple(rank // half for rank in dist.get_process_group_ranks(spread))
        return cls(_named(tensor), _named(spread), lanes, mesh)


def _tensor(layout: Layout) -> Iterator[list[int]]:
    """Neighbours: they talk most."""
    return (list(range(start, start + layout.tensor)) for start in range(0, layout.world, layout.tensor))


def _shard(layout: Layout) -> Iterator[list[int]]:
    return (ranks[part :: layout.tensor] for ranks in _spread(layout) for part in range(layout.tensor))


def _spread(layout: Layout) -> Iterator[list[int]]:
    """Ranks of one pipeline stage, in order, so many that each part of each layer is held `shard` times in pieces."""
    size = layout.shard * layout.tensor
    for stage in range(layout.pipeline):
        ranks = [rank for rank in range(layout.world) if layout.stage(rank) == stage]
        yield from (ranks[start : start + size] for start in range(0, len(ranks), size))


def _mine(groups: list[list[int]]) -> dist.ProcessGroup:
    made = [(ranks, dist.new_group(ranks)) for ranks in groups]
    return cast(dist.ProcessGroup, next(group for ranks, group in made if dist.get_rank() in ranks))


def _named(group: dist.ProcessGroup) -> Group:
    return Group(group.group_name, group.size(), group.rank()) if group.size() > 1 else ALONE
