"""Where a rank stands among those that share one sequence: plain names and numbers, safe inside a compiled graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from diptych.errors import LayoutError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh


class Group(NamedTuple):
    """A process group by name, its size, and this rank's number in it."""

    name: str
    size: int
    rank: int


ALONE = Group("", 1, 0)
"""A group of one: nothing is ever sent in it."""


@dataclass(frozen=True)
class Place:
    """A rank of ring x ulysses. Ranks are numbered ring-major: rank = r * U + u.

    ring: the R ranks with the same u; keys and values travel round it.
    ulysses: the U ranks with the same r; heads are exchanged for tokens in it.
    sequence: all R * U ranks in that order, or None if built from groups without it.

    `Place()` is a rank on its own.
    """

    ring: Group = ALONE
    ulysses: Group = ALONE
    sequence: Group | None = ALONE

    @property
    def world(self) -> int:
        return self.ring.size * self.ulysses.size

    @property
    def rank(self) -> int:
        return self.ring.rank * self.ulysses.size + self.ulysses.rank

    @classmethod
    def from_mesh(cls, mesh: DeviceMesh) -> Place:
        """This rank's place in a mesh with a dimension `ring`, a dimension `ulysses`, or both in this order.

        Other dimensions are left alone. The first call on a mesh with both makes a process group: every rank must
        make it. Raises `LayoutError` if the mesh has neither.
        """
        names = tuple(name for name in mesh.mesh_dim_names or () if name in ("ring", "ulysses"))
        if names not in (("ring",), ("ulysses",), ("ring", "ulysses")):
            raise LayoutError(
                f"mesh dimensions {mesh.mesh_dim_names} cannot split a sequence: name them ring, ulysses, or both in "
                "this order."
            )
        groups = {name: _group(mesh.get_group(name)) for name in names}
        ring, ulysses = groups.get("ring", ALONE), groups.get("ulysses", ALONE)
        if ring.size > 1 and ulysses.size > 1:
            return cls(ring, ulysses, _group(mesh["ring", "ulysses"]._flatten("sequence").get_group()))
        return cls(ring, ulysses, ring if ring.size > 1 else ulysses)

    @classmethod
    def from_groups(
        cls,
        *,
        ring: ProcessGroup | None = None,
        ulysses: ProcessGroup | None = None,
        sequence: ProcessGroup | None = None,
    ) -> Place:
        """This rank's place given its process groups; a group left out has one rank.

        sequence: all ranks of ring x ulysses, ring-major; needed only to gather tokens or to merge replicated queries,
        and only where both others have several ranks.

        Raises `LayoutError` if `sequence` does not hold ring x ulysses ranks in ring-major order.
        """
        ring_group = _group(ring) if ring is not None else ALONE
        ulysses_group = _group(ulysses) if ulysses is not None else ALONE
        if ring_group.size == 1 or ulysses_group.size == 1:
            whole = ring_group if ring_group.size > 1 else ulysses_group
            return cls(ring_group, ulysses_group, whole)
        if sequence is None:
            return cls(ring_group, ulysses_group, None)
        place = cls(ring_group, ulysses_group, _group(sequence))
        if (sequence.size(), sequence.rank()) != (place.world, place.rank):
            raise LayoutError(
                f"the sequence group has {sequence.size()} ranks and this one is number {sequence.rank()}: "
                f"ring x ulysses, ring-major, needs {place.world} ranks and number {place.rank} here."
            )
        return place


def _group(group: ProcessGroup) -> Group:
    return Group(group.group_name, group.size(), group.rank())
