"""Guidance on two halves of the ranks: one computes the conditional pass, the other the unconditional one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from diptych.attention.collectives import start_all_gather
from diptych.attention.place import ALONE, Group

CONDITIONAL, UNCONDITIONAL = 0, 1
"""Lanes, in the order in which one process runs them."""


def guided(cond: Tensor, uncond: Tensor, guidance: float) -> Tensor:
    """`uncond + guidance * (cond - uncond)` in float32, term by term as one process computes it."""
    return uncond.float() + guidance * (cond.float() - uncond.float())


class GuidancePair:
    """This rank and the one with the same tokens in the other half, along the mesh dimension `cfg`.

    lane: the pass this rank is to compute, `CONDITIONAL` or `UNCONDITIONAL`.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        group = mesh.get_group("cfg")
        self.group = Group(group.group_name, group.size(), group.rank()) if group.size() > 1 else ALONE
        assert self.group.size in (1, 2), f"guidance has two passes, not {self.group.size}"
        self.lane = self.group.rank

    @property
    def split(self) -> bool:
        """Whether there are two halves; otherwise both passes run here."""
        return self.group.size == 2

    def exchange(self, velocities: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Both passes' velocities, (conditional, unconditional), on every rank, given this rank's own.

        velocities: whole tensors of one dtype (video and, where there is one, audio), alike in both halves. They travel
        in one collective, unrounded; so whatever is computed from the result is computed by both halves from the same
        numbers, and equals one process bit by bit. A weighted sum by all-reduce would not.
        """
        assert self.split, "one half only: both passes run here"
        assert len({x.dtype for x in velocities}) == 1, "velocities of several dtypes"
        sizes = [x.numel() for x in velocities]
        both = start_all_gather(torch.cat([x.reshape(-1) for x in velocities]), self.group).wait()
        lanes = [
            [x.view(like.shape) for x, like in zip(lane.split(sizes), velocities, strict=True)]
            for lane in both.chunk(2)
        ]
        return lanes[CONDITIONAL], lanes[UNCONDITIONAL]

    def combine(self, velocities: Sequence[Tensor], guidance: float) -> list[Tensor]:
        """The guided velocities, float32, the same bits on every rank and in one process."""
        cond, uncond = self.exchange(velocities)
        return [guided(c, u, guidance) for c, u in zip(cond, uncond, strict=True)]
