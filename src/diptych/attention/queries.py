"""Queries with what is still to be done to them, for a kernel that can do it while it holds them anyway."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

HELD = 1 << 15
"""Channels of one head's keys that a Hopper's shared memory holds beside as many of its values: 256 keys of 128."""


class Queries(NamedTuple):
    """What stands for queries in a call: a kernel that knows it saves passes over memory, every other takes `made()`.

    x_BSHK: the queries. weight_K: an RMSNorm of each head with this weight, `eps` and `scale` is still to be done, and
    `make` does it; None: they are as they will be attended with.
    fp8_scale: the result goes where e4m3 is wanted and no value is larger than 448 of this float32 scalar, so that
    result / fp8_scale may be returned in float8_e4m3fn; None: only the dtype of x is.
    """

    x_BSHK: Tensor
    weight_K: Tensor | None = None
    scale: float = 1.0
    eps: float = 0.0
    make: Callable[[], Tensor] | None = None
    fp8_scale: Tensor | None = None

    def made(self) -> Tensor:
        """The queries themselves. Once: what makes them may write over `x_BSHK`."""
        if self.weight_K is None:
            return self.x_BSHK
        assert self.make is not None, "queries that are not normalised come with who normalises them"
        return self.make()


def made(q: Tensor | Queries) -> Tensor:
    """The queries themselves, whatever stands for them."""
    return q.made() if isinstance(q, Queries) else q
