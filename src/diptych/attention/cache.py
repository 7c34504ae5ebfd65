"""Keys and values kept between the patches of one step, for patch pipelining.

A warm-up call processes the whole sequence and fills the cache; a later call processes one patch, with fresh keys and
values for it and stale ones for the rest. The store is patch-major: patch p of all ranks of the Ulysses group lies in
one piece, in rank order, so that what the exchange delivers for a patch overwrites exactly that patch. Rank-major would
be the order in which a warm-up arrives, and a patch written over it would hit tokens of other patches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from diptych.attention.plan import Plan, spans


class PatchCache:
    """The cache of one attention in one guidance lane of one request. `reset()` forgets everything.

    Holds k and v as (B, tokens of the Ulysses group, own key heads, K); keys of joint tensors are never in it.
    """

    def __init__(self) -> None:
        self.k_BCHK: Tensor | None = None
        self.v_BCHK: Tensor | None = None

    def reset(self) -> None:
        self.k_BCHK = self.v_BCHK = None

    def update(self, k_BLHK: Tensor, v_BLHK: Tensor, plan: Plan, patch: int | None) -> tuple[Tensor, Tensor]:
        """Store what an exchange delivered, for all patches (`patch` None) or one; return all keys and values."""
        if patch is None:
            self.k_BCHK, self.v_BCHK = patch_major(k_BLHK, plan), patch_major(v_BLHK, plan)
            return self.k_BCHK, self.v_BCHK
        assert self.k_BCHK is not None and self.v_BCHK is not None, "a patch before any warm-up call"
        start, stop = plan.patch_span(patch)
        self.k_BCHK[:, start:stop] = k_BLHK
        self.v_BCHK[:, start:stop] = v_BLHK
        return self.k_BCHK, self.v_BCHK


def patch_major(x_BLHK: Tensor, plan: Plan) -> Tensor:
    """From (rank, patch) order, as a warm-up exchange delivers it, to (patch, rank) order."""
    ring_rank = plan.place.ring.rank
    of_patches = [plan.in_ring(lengths, ring_rank) for lengths in plan.patches]
    rank_starts = spans(plan.in_ring(plan.lengths, ring_rank))
    pieces = []
    for p, lengths in enumerate(of_patches):
        for u, length in enumerate(lengths):
            start = rank_starts[u].start + sum(earlier[u] for earlier in of_patches[:p])
            pieces.append(x_BLHK[:, start : start + length])
    return torch.cat(pieces, 1)
