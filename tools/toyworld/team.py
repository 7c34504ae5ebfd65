"""Several processes that train one model, a GPU each: `torchrun --nproc-per-node N -m tools.toyworld train flow ..`."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from tools.toyworld.training import device


@dataclass(frozen=True)
class Team:
    """This process among `size`; alone, nothing is exchanged. `share` averages a vector in place, `None` when alone."""

    rank: int
    size: int
    place: torch.device
    share: Callable[[Tensor], None] | None

    @classmethod
    def join(cls) -> Team:
        """Join the processes that torchrun started; without it, be alone."""
        place, size = device(), int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls(0, 1, place, None)
        if place.type == "cuda":
            place = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(place)
        dist.init_process_group("cpu:gloo,cuda:nccl" if place.type == "cuda" else "gloo")

        def share(values: Tensor) -> None:
            dist.all_reduce(values)
            values.div_(size)

        return cls(dist.get_rank(), size, place, share)

    def agree(self, *values: float) -> tuple[float, ...]:
        """The first process's values, for all."""
        if self.size == 1:
            return values
        told = torch.tensor(values, dtype=torch.float64)
        dist.broadcast(told, 0)
        return tuple(told.tolist())

    def leave(self) -> None:
        if self.size > 1:
            dist.destroy_process_group()
