"""PipeFusion's patches: one sequence cut into patches that follow each other through the stages of a pipeline.

A patch attends to its own fresh keys, to the fresh ones of the patches before it, and to those that the patches behind
it had one step ago. (PipeFusion: Fang et al. 2024, arXiv:2405.14430.)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from diptych.attention.cache import PatchCache
from diptych.attention.collectives import start_all_gather
from diptych.attention.local import LocalAttend
from diptych.attention.place import Group, Place
from diptych.attention.plan import Plan, Span, spans, split
from diptych.attention.queries import Queries, made
from diptych.attention.roles import Role
from diptych.attention.unified import Exchange, unified_attention
from diptych.parallel.sequence import merge_over


class PatchShard:
    """`tokens` tokens cut into `patches`, each of them split over the ring and Ulysses ranks of a mesh.

    A rank holds its parts of all patches, one after the other. There are never more patches than leave a token for
    every rank in each. Given a mesh, every rank must build its shard at the same point: the first one may make a
    process group.

    plan: all ranks' lengths. local: the same patches as this rank sees them alone.
    """

    def __init__(self, tokens: int, patches: int, mesh: DeviceMesh | Place) -> None:
        place = mesh if isinstance(mesh, Place) else Place.from_mesh(mesh)
        assert place.sequence is not None, "gathering tokens needs the group of all ranks that share the sequence"
        self.group: Group = place.sequence
        self.patches = max(1, min(patches, tokens // place.world))
        self.plan = Plan.patched(place, tuple(split(size, place.world) for size in split(tokens, self.patches)))
        self.local = Plan.patched(Place(), tuple((lengths[place.rank],) for lengths in self.plan.patches))

    @property
    def tokens(self) -> int:
        return self.plan.tokens

    def own(self, patch: int | None) -> slice:
        """Where a patch, or all of them, stands among this rank's tokens."""
        if patch is None:
            return slice(None)
        span = self.local.patch_span(patch)
        return slice(span.start, span.stop)

    def size(self, patch: int | None) -> int:
        """How many of this rank's tokens are in a patch, or in all."""
        return self.local.query_lengths(patch)[0]

    def scatter(self, tokens: Tensor, dim: int = 1) -> Tensor:
        """This rank's parts of a whole tensor along `dim`: tokens (B, S, D), or with `dim` 0 a RoPE table (S, ...)."""
        assert tokens.shape[dim] == self.tokens, f"{tokens.shape[dim]} tokens, not {self.tokens}"
        return torch.cat([tokens.narrow(dim, span.start, span.size) for span in self._whole(self.group.rank)], dim)

    def gather(self, tokens_BsC: Tensor) -> Tensor:
        """All ranks' tokens (B, S, C) in the order of one process, on every rank, by one collective."""
        if self.group.size == 1:
            return tokens_BsC
        longest = max(self.plan.lengths)
        padded_BtC = pad(tokens_BsC, (0, 0, 0, longest - tokens_BsC.shape[1]))
        all_RBtC = start_all_gather(padded_BtC, self.group).wait().unflatten(0, (self.group.size, -1))
        pieces = [
            of_rank.split([*of_patches, longest - sum(of_patches)], 1)
            for of_rank, of_patches in zip(all_RBtC.unbind(0), zip(*self.plan.patches, strict=True), strict=True)
        ]
        return torch.cat([of_rank[patch] for patch in range(self.patches) for of_rank in pieces], 1)

    def _whole(self, rank: int) -> list[Span]:
        """Where a rank's part of each patch stands in the whole sequence."""
        starts = spans(tuple(sum(lengths) for lengths in self.plan.patches))
        inside = [spans(lengths)[rank] for lengths in self.plan.patches]
        return [Span(p.start + r.start, p.start + r.stop) for p, r in zip(starts, inside, strict=True)]


@dataclass(frozen=True)
class BlockCaches:
    """Keys and values of one block in one lane of guidance of one request.

    within: of the attention among the split tokens. from_video: what the replicated stream reads of them; this rank's
    tokens only. joint: of the tokens that stand beside the split ones, kept from the patch that computed them.
    """

    within: PatchCache = field(default_factory=PatchCache)
    from_video: PatchCache = field(default_factory=PatchCache)
    joint: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class PatchAttend:
    """An `Attend` for one patch, or all of them, in one block: as `SequenceAttend`, but to cached keys as well.

    `of(caches, patch)` gives the one for a block; without it, only the roles that meet no video tokens can be served.

    kernel: as for `LocalAttend`. exchange: as for `unified_attention`.
    """

    def __init__(
        self,
        shard: PatchShard,
        *,
        kernel: str | Mapping[Role, str] = "auto",
        exchange: Exchange = "packed",
        caches: BlockCaches | None = None,
        patch: int | None = None,
    ) -> None:
        self.shard, self.exchange, self.caches, self.patch = shard, exchange, caches, patch
        self.local = LocalAttend(kernel)

    def of(self, caches: BlockCaches, patch: int | None) -> PatchAttend:
        return PatchAttend(self.shard, kernel=self.local.kernels, exchange=self.exchange, caches=caches, patch=patch)

    def exact(self) -> PatchAttend:
        """The same without kernels that approximate."""
        kernels = self.local.exact().kernels
        return PatchAttend(self.shard, kernel=kernels, exchange=self.exchange, caches=self.caches, patch=self.patch)

    def __call__(
        self,
        role: Role,
        q_BSHK: Tensor | Queries,
        k_BSHK: Tensor,
        v_BSHK: Tensor,
        key_mask_BS: Tensor | None = None,
        *,
        bound: float | None = None,
    ) -> Tensor:
        if role is Role.VISUAL_SELF:
            assert self.caches is not None and key_mask_BS is None
            return unified_attention(
                made(q_BSHK),
                k_BSHK,
                v_BSHK,
                self.shard.plan,
                cache=self.caches.within,
                patch=self.patch,
                kernel=self.local.kernels[role],
                exchange=self.exchange,
                bound=bound,
            ).out_BsHK
        if role is Role.AUDIO_FROM_VIDEO:
            assert self.caches is not None and key_mask_BS is None
            k_BSHK, v_BSHK = self.caches.from_video.update(k_BSHK, v_BSHK, self.shard.local, self.patch)
            if self.shard.group.size > 1:
                partial = self.local.with_lse(role, made(q_BSHK), k_BSHK, v_BSHK, bound=bound)
                return merge_over(self.shard.group, *partial)
        return self.local(role, q_BSHK, k_BSHK, v_BSHK, key_mask_BS, bound=bound)
