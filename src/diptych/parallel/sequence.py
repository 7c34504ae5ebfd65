"""One sequence of video tokens on several ranks: who holds which, and how each role of attention runs on them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

from diptych.attention.collectives import start_all_gather
from diptych.attention.local import LocalAttend
from diptych.attention.merge import merge
from diptych.attention.place import Group, Place
from diptych.attention.plan import Plan
from diptych.attention.queries import Queries, made
from diptych.attention.roles import Role
from diptych.attention.unified import Exchange, unified_attention


class TokenShard:
    """`tokens` video tokens split over the ring and Ulysses ranks of a mesh, the first ranks one more than the last.

    plan, span: all ranks' lengths, and where this rank's tokens stand; both fixed before anything is computed.
    Given a mesh, every rank must build its shard at the same point: the first one may make a process group.
    """

    def __init__(self, tokens: int, mesh: DeviceMesh | Place) -> None:
        place = mesh if isinstance(mesh, Place) else Place.from_mesh(mesh)
        assert place.sequence is not None, "gathering tokens needs the group of all ranks that share the sequence"
        self.group: Group = place.sequence
        self.plan = Plan.even(place, tokens)
        self.span = self.plan.span

    @property
    def tokens(self) -> int:
        return self.plan.tokens

    def scatter(self, tokens: Tensor, dim: int = 1) -> Tensor:
        """This rank's slice of a whole tensor along `dim`: tokens (B, S, D), or with `dim` 0 a RoPE table (S, ...)."""
        assert tokens.shape[dim] == self.tokens, f"{tokens.shape[dim]} tokens, not {self.tokens}"
        return tokens.narrow(dim, self.span.start, self.span.size)

    def gather(self, tokens_BsC: Tensor) -> Tensor:
        """All ranks' tokens (B, S, C), on every rank, from each rank's own (B, s, C), by one collective.

        Shards are padded to the longest on the wire; the padding is cut off by sizes known beforehand.
        """
        assert tokens_BsC.shape[1] == self.span.size, f"{tokens_BsC.shape[1]} tokens here, not {self.span.size}"
        if self.group.size == 1:
            return tokens_BsC
        longest = max(self.plan.lengths)
        padded_BtC = pad(tokens_BsC, (0, 0, 0, longest - self.span.size))
        all_RBtC = start_all_gather(padded_BtC, self.group).wait().unflatten(0, (self.group.size, -1))
        return torch.cat([x_BtC[:, :n] for x_BtC, n in zip(all_RBtC.unbind(0), self.plan.lengths, strict=True)], 1)


class SequenceAttend:
    """An `Attend` for a transformer whose video tokens are split as `shard` says, and all else is on every rank.

    visual_self: unified attention. audio_from_video: attention to this rank's video tokens, merged over all ranks;
    the result has the same bits on every rank, so that the replicated audio cannot drift apart. All other roles see
    only what every rank holds, or query with their own tokens: they run as `LocalAttend` runs them, sending nothing.

    A key mask over video tokens is whole, (B, S), and equal on all ranks.

    kernel: as for `LocalAttend`. exchange: as for `unified_attention`.
    """

    def __init__(
        self, shard: TokenShard, *, kernel: str | Mapping[Role, str] = "auto", exchange: Exchange = "packed"
    ) -> None:
        self.shard, self.exchange = shard, exchange
        self.local = LocalAttend(kernel)

    def exact(self) -> SequenceAttend:
        """The same without kernels that approximate."""
        return SequenceAttend(self.shard, kernel=self.local.exact().kernels, exchange=self.exchange)

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
            return unified_attention(
                made(q_BSHK),
                k_BSHK,
                v_BSHK,
                self.shard.plan,
                key_mask_BS=key_mask_BS,
                kernel=self.local.kernels[role],
                exchange=self.exchange,
                bound=bound,
            ).out_BsHK
        if role is Role.AUDIO_FROM_VIDEO and self.shard.group.size > 1:
            own_mask = None if key_mask_BS is None else self.shard.scatter(key_mask_BS)
            out_BAHK, lse_BAH = self.local.with_lse(role, made(q_BSHK), k_BSHK, v_BSHK, own_mask, bound=bound)
            return merge_over(self.shard.group, out_BAHK, lse_BAH)
        return self.local(role, q_BSHK, k_BSHK, v_BSHK, key_mask_BS, bound=bound)


def merge_over(group: Group, out_BAHK: Tensor, lse_BAH: Tensor) -> Tensor:
    """Attention of replicated queries, from each rank's part over its own keys, by one collective.

    Outputs travel in their own dtype, each with its log-sum-exp beside it in float32 (float64 for float64). Every rank,
    its own part included, merges what came over the wire, in rank order: all get the same bits.
    """
    K, dtype = out_BAHK.shape[-1], out_BAHK.dtype
    lse_as_dtype = lse_BAH.unsqueeze(-1).contiguous().view(dtype)
    packed = torch.cat([out_BAHK, lse_as_dtype], -1)
    of_ranks = start_all_gather(packed, group).wait().unflatten(0, (group.size, -1)).unbind(0)
    parts = [(x[..., :K], x[..., K:].contiguous().view(lse_BAH.dtype).squeeze(-1)) for x in of_ranks]
    return merge(parts, dtype)[0]
