"""One answer for all ranks: whatever changes control flow goes through here, or ranks wait for each other for ever."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Agreement:
    """rank of world. Alone by default: then nothing is sent."""

    rank: int = 0
    world: int = 1

    @classmethod
    def of_all_ranks(cls) -> Agreement:
        """Over the default process group, on the CPU."""
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def first(self) -> bool:
        """Whether this rank speaks where one has to: for what every rank holds alike."""
        return self.rank == 0

    def total(self, values: Sequence[float]) -> list[float]:
        """Sums over all ranks, added in rank order in float64: the same bits everywhere. All ranks call it together."""
        if self.world == 1:
            return list(values)
        mine = torch.tensor(values, dtype=torch.float64)
        of_ranks = [torch.empty_like(mine) for _ in range(self.world)]
        dist.all_gather(of_ranks, mine)
        total = torch.zeros_like(mine)
        for theirs in of_ranks:
            total += theirs
        summed: list[float] = total.tolist()
        return summed

    def decide(self, flag: bool) -> bool:
        """The first rank's answer, on every rank."""
        return self.total([float(flag and self.first)])[0] > 0
