"""How many ranks work on a clip and what each axis of them splits: `Layout`, written `cfg=2,ulysses=4`."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from diptych.errors import LayoutError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

MESH_DIMS = ("cfg", "pipeline", "ring", "ulysses", "tensor")
"""Rank order: rank = (((c * pipeline + p) * ring + r) * ulysses + u) * tensor + t."""
MOST_DIGITS = 9
"""Of a number of ranks; Python itself refuses to read thousands."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Ranks along each axis; the product of all but `shard` is the number of processes.

    cfg: 2 computes the conditional and the unconditional pass of guidance on two halves of the ranks.
    pipeline: splits the blocks; patches of the video tokens follow each other through them, an approximation.
    ring, ulysses: split the video tokens; Ulysses also splits the heads, a ring passes keys and values round.
    tensor: splits the layers themselves, heads and feed-forward.
    shard: adds no ranks: so many of those that the other axes make hold one copy of the weights together, in pieces.

    Raises `LayoutError` for a value that cannot be built.
    """

    cfg: int = 1
    pipeline: int = 1
    tensor: int = 1
    ring: int = 1
    ulysses: int = 1
    shard: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LayoutError(
                    f"layout {field.name} = {value!r} is not accepted: a whole number of ranks, 1 or more."
                )
        if self.cfg > 2:
            raise LayoutError(f"layout cfg = {self.cfg} is not accepted: 1, or 2 for the two passes of guidance.")
        copies = self.world // self.pipeline // self.tensor
        if copies % self.shard:
            raise LayoutError(
                f"layout shard = {self.shard} is not accepted: it adds no ranks but parts the weights among those that "
                f"cfg, ring and ulysses make ({copies} here), and divides their number; write ulysses=2,shard=2."
            )

    @classmethod
    def parse(cls, text: str) -> Layout:
        """Read `cfg=2,ulysses=4`; axes left out are 1, and `single` is one rank. Raises `LayoutError`."""
        if text.strip() == "single":
            return cls()
        values: dict[str, int] = {}
        known = [field.name for field in fields(cls)]
        for part in text.split(","):
            name, equals, number = (piece.strip() for piece in part.partition("="))
            if not equals:
                raise LayoutError(
                    f"layout {text!r} is not accepted: write axis=ranks, as in cfg=2,ulysses=4, or single."
                )
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {close[0]}?" if close else "axes are " + ", ".join(known) + "."
                raise LayoutError(f"layout axis {name!r} is not accepted: {hint}")
            if name in values:
                raise LayoutError(f"layout {text!r} is not accepted: {name} is given twice.")
            if not number.isascii() or not number.isdecimal() or len(number) > MOST_DIGITS:
                raise LayoutError(f"layout {name} = {number!r} is not accepted: a whole number of ranks, 1 or more.")
            values[name] = int(number)
        return cls(**values)

    def __str__(self) -> str:
        given = [f"{field.name}={getattr(self, field.name)}" for field in fields(self) if getattr(self, field.name) > 1]
        return ",".join(given) or "single"

    @property
    def world(self) -> int:
        """Number of processes."""
        return self.cfg * self.pipeline * self.sequence * self.tensor

    @property
    def sequence(self) -> int:
        """Ranks that share one sequence of video tokens."""
        return self.ring * self.ulysses

    def mesh(self, device_type: str) -> DeviceMesh:
        """The mesh over all ranks, with the dimensions of `MESH_DIMS`. Every rank must call it.

        Raises `LayoutError` if the running process group has another number of ranks, or there is none.
        """
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh

        if not dist.is_initialized():
            raise LayoutError(f"layout {self} needs a process group of {self.world} ranks, and none is running.")
        running = dist.get_world_size()
        if running != self.world:
            raise LayoutError(f"layout {self} needs {self.world} ranks, {running} are running.")
        sizes = (self.cfg, self.pipeline, self.ring, self.ulysses, self.tensor)
        return init_device_mesh(device_type, sizes, mesh_dim_names=MESH_DIMS)

    def stage(self, rank: int) -> int:
        """The pipeline stage of a rank."""
        return rank // (self.sequence * self.tensor) % self.pipeline
