"""Stages of a pipeline: which rank holds which blocks, and how work passes from one to the next."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from diptych.attention.collectives import start_all_to_all
from diptych.attention.place import ALONE, Group
from diptych.attention.plan import spans, split

Shapes = Sequence[tuple[int, ...]]


def stage_blocks(blocks: int, stages: int, stage: int) -> range:
    """The blocks of a stage: as evenly as they go, the first stages one more."""
    span = spans(split(blocks, stages))[stage]
    return range(span.start, span.stop)


class Stages:
    """This rank among those that hold the other blocks for the same tokens, along the mesh dimension `pipeline`."""

    def __init__(self, group: Group = ALONE) -> None:
        self.group = group

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> Stages:
        group = mesh.get_group("pipeline")
        return cls(Group(group.group_name, group.size(), group.rank()))

    @property
    def count(self) -> int:
        return self.group.size

    @property
    def stage(self) -> int:
        return self.group.rank

    @property
    def first(self) -> bool:
        return self.stage == 0

    @property
    def last(self) -> bool:
        return self.stage == self.count - 1

    def run(
        self,
        units: int,
        compute: Callable[[int, list[Tensor] | None], list[Tensor]],
        shapes: Callable[[int], Shapes],
        like: Tensor,
    ) -> list[list[Tensor]]:
        """Pass `units` pieces of work through all stages; every stage calls it alike. Returns what this one made.

        compute: from a unit's number and what the stage before made of it (`None` on the first) to its tensors here.
        shapes: of what passes between stages for a unit; all of it in dtype and on device of `like`.

        In slot t, stage s computes unit t - s; after each slot every stage hands on and receives, in one collective. So
        nobody can wait for one who waits for him, and `count - 1` slots of `units + count - 1` are idle on each stage.
        """
        made: list[list[Tensor]] = []
        received: list[Tensor] | None = None
        slots = units + self.count - 1
        for slot in range(slots):
            unit = slot - self.stage
            out: list[Tensor] = []
            if 0 <= unit < units:
                out = compute(unit, received)
                made.append(out)
            if slot < slots - 1:
                coming = shapes(unit + 1) if not self.first and 0 <= unit + 1 < units else []
                received = self._hand_on([] if self.last else out, coming, like)
        return made

    def _hand_on(self, out: Sequence[Tensor], coming: Shapes, like: Tensor) -> list[Tensor] | None:
        """Send tensors to the next stage, receive tensors of the shapes `coming` from the one before."""
        if self.count == 1:
            return None
        sizes = [torch.Size(shape).numel() for shape in coming]
        flat_N = torch.cat([x.reshape(-1) for x in out]) if out else like.new_empty(0)
        send, receive = [0] * self.count, [0] * self.count
        if not self.last:
            send[self.stage + 1] = flat_N.numel()
        if not self.first:
            receive[self.stage - 1] = sum(sizes)
        came_N = start_all_to_all(flat_N, send, receive, self.group).wait()
        return [x.view(shape) for x, shape in zip(came_N.split(sizes), coming, strict=True)] if coming else None

    def from_last(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The last stage's tensors on every stage, by one collective. The others pass some of the same shapes."""
        if self.count == 1:
            return list(tensors)
        flat_N = torch.cat([x.reshape(-1) for x in tensors])
        n = flat_N.numel()
        send = [n] * self.count if self.last else [0] * self.count
        receive = [0] * (self.count - 1) + [n]
        sent_N = flat_N.repeat(self.count) if self.last else flat_N[:0]
        came_N = start_all_to_all(sent_N, send, receive, self.group).wait()
        return [x.view(t.shape) for x, t in zip(came_N.split([t.numel() for t in tensors]), tensors, strict=True)]
