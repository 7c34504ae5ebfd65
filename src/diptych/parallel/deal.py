"""Pieces of work dealt to all ranks, and their results brought to the first rank in the order of the pieces.

Which rank does which piece is a function of its number, so nothing is asked over the network. The first rank comes last
in every round: it never does more pieces than another, and has time for what only it can do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

Work = Callable[[int], Tensor]


@dataclass(frozen=True)
class Deal:
    """rank of world, over the default process group. Alone by default: then nothing is sent.

    A rank holds two results at most: the one it sends and the one it makes; the first rank its own of a round and the
    one it receives.
    """

    rank: int = 0
    world: int = 1

    @classmethod
    def to_all_ranks(cls) -> Deal:
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def first(self) -> bool:
        """Whether this rank gets the results."""
        return self.rank == 0

    def owner(self, piece: int) -> int:
        """The rank that does a piece."""
        return (piece + 1) % self.world

    def same(self, x: Tensor) -> Tensor:
        """The first rank's `x`, of one shape and dtype everywhere, on every rank. All ranks call it together."""
        if self.world == 1:
            return x
        x = x.contiguous()
        dist.broadcast(x, src=0)
        return x

    @contextmanager
    def results(self, pieces: int, work: Work, empty: Work) -> Iterator[Iterator[Tensor]]:
        """On the first rank: every piece's result, in order, made or received as the iterator is asked for it.

        work(piece): its result. empty(piece): a tensor of the result's shape, dtype and device, to receive into.
        The others call `lend` meanwhile. Whatever ends the block, they are relieved of what they still hold.
        """
        assert self.first
        received = self._round_by_round(pieces, work, empty, dropping := [])
        try:
            yield received
        finally:
            dropping.append(True)
            for _ in received:
                pass

    def lend(self, pieces: int, work: Work) -> None:
        """On the other ranks: do this rank's pieces and send each to the first rank while doing the next."""
        assert not self.first
        sent: tuple[Any, Tensor] | None = None
        for piece in range(pieces):
            if self.owner(piece) == self.rank:
                result = work(piece).contiguous()
                if sent is not None:
                    sent[0].wait()
                sent = dist.isend(result, dst=0), result
        if sent is not None:
            sent[0].wait()

    def _round_by_round(self, pieces: int, work: Work, empty: Work, dropping: list[bool]) -> Iterator[Tensor]:
        for start in range(0, pieces, self.world):
            here = range(start, min(start + self.world, pieces))
            # Own work first: the others are at theirs.
            own = [work(piece) for piece in here if self.owner(piece) == 0 and not dropping]
            for piece in here:
                if self.owner(piece):
                    yield self._received(piece, empty)
                elif own:
                    yield own.pop()

    def _received(self, piece: int, empty: Work) -> Tensor:
        result = empty(piece)
        dist.recv(result, src=self.owner(piece))
        return result
