"""Unified sequence-parallel attention: one long sequence on R x U ranks, Ulysses inside, a ring around it.

    own tokens, all heads --all-to-all--> tokens of the group, own heads --ring, attend--> --all-to-all--> own tokens

With U = 1 it is ring attention, with R = 1 Ulysses, which gives the very bits of one process: there each head is
computed whole, by one kernel call, with its keys in their single-process order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from diptych.attention.cache import PatchCache
from diptych.attention.joint import Joint
from diptych.attention.kernels import need_of, pick
from diptych.attention.plan import Heads, Plan, deal_heads
from diptych.attention.ring import AttendWithLse, Partial, ring_attention
from diptych.attention.ulysses import HeadExchange, heads_back, tokens_back

Exchange = Literal["packed", "overlapped"]
Given = Tensor | Callable[[], Tensor]
"""A tensor, or a function that makes it when its turn has come."""


class Attended(NamedTuple):
    """out_BsHK: for this rank's queries. joint_BJHK: for the joint queries, the same bits on every rank.

    lse_BsH, joint_lse_BJH: natural log-sum-exp, float32 (float64 for float64); None unless asked for.
    """

    out_BsHK: Tensor
    joint_BJHK: Tensor | None = None
    lse_BsH: Tensor | None = None
    joint_lse_BJH: Tensor | None = None


def unified_attention(
    q_BsHK: Given,
    k_BsHK: Given,
    v_BsHK: Given,
    plan: Plan,
    *,
    joint: Joint | None = None,
    key_mask_BS: Tensor | None = None,
    cache: PatchCache | None = None,
    patch: int | None = None,
    kernel: str = "auto",
    exchange: Exchange = "packed",
    heads: tuple[int, int] | None = None,
    return_lse: bool = False,
    bound: float | None = None,
) -> Attended:
    """Softmax attention, scale 1/sqrt(K), of a sequence that lies on the ranks of `plan.place`.

    q_BsHK, k_BsHK, v_BsHK: this rank's tokens, as `plan.lengths` says; k and v may have fewer heads (grouped queries).
    joint: queries, keys and values that all ranks hold, attended once.
    key_mask_BS: bool over the whole sequence in its single-process order, equal on all ranks; True: visible.
    cache, patch: for patch pipelining. With `patch` None all patches are given and fill the cache; with a number only
    that patch's tokens are given (`plan.patches[patch]`), and attend to fresh keys for it and cached ones for the rest.
    kernel: a name of the registry, or `"auto"`.
    exchange: `"packed"` sends q, k, v in one all-to-all; `"overlapped"` in three, v first, then q, then k, each started
    before the next is made: pass functions instead of tensors, and each is computed while the one before travels.
    heads: (query heads, key heads), needed only where functions are passed.
    return_lse: also return log-sum-exps; a query without any visible key gets zeros, and `NO_KEY` there.
    bound: queries, joint ones too, carry log2(e)/sqrt(K) in the place of the scale, and no |q k| is larger than this.

    Every size is a number known beforehand, so that under `torch.compile(fullgraph=True)` this is one graph. All ranks
    must call it alike. Raises `KernelError` for a kernel that cannot do what is asked.
    """
    place = plan.place
    assert patch is None or cache is not None, "a patch needs the cache that a warm-up call filled"
    assert cache is None or plan.patches, "a cache needs a plan with patches"
    if heads is None:
        assert isinstance(q_BsHK, Tensor) and isinstance(k_BsHK, Tensor), (
            "functions instead of tensors: say how many heads"
        )
        heads = q_BsHK.shape[2], k_BsHK.shape[2]
    dealt = deal_heads(*heads, place.ulysses.size)
    lengths = plan.in_ring(plan.query_lengths(patch), place.ring.rank)
    q, k, v = _exchange(q_BsHK, k_BsHK, v_BsHK, lengths, dealt, plan, exchange)
    if cache is not None:
        k, v = cache.update(k, v, plan, patch)

    own = dealt[place.ulysses.rank]
    own_joint = None if joint is None else joint.of_heads(own)
    masks = [_mask_of(plan, source, key_mask_BS) for source in range(place.ring.size)]
    if place.ring.size == 1:
        result, joint_result = _attend_whole(_attend_with(kernel, own, return_lse, bound), q, k, v, masks[0], own_joint)
    else:
        result, joint_result = ring_attention(
            _attend_with(kernel, own, True, bound),
            q,
            k,
            v,
            group=place.ring,
            lengths=plan.ring_lengths,
            masks=masks,
            joint=own_joint,
        )

    q_spans = [rank.q for rank in dealt]
    out = tokens_back(result[0], lengths, q_spans, place.ulysses)
    lse = tokens_back(result[1].unsqueeze(-1), lengths, q_spans, place.ulysses).squeeze(-1) if return_lse else None
    if joint_result is None:
        return Attended(out, None, lse, None)
    joint_out = heads_back(joint_result[0], q_spans, place.ulysses)
    joint_lse = heads_back(joint_result[1].unsqueeze(-1), q_spans, place.ulysses).squeeze(-1) if return_lse else None
    return Attended(out, joint_out, lse, joint_lse)


def _exchange(
    q: Given, k: Given, v: Given, lengths: Sequence[int], dealt: Sequence[Heads], plan: Plan, exchange: Exchange
) -> list[Tensor]:
    """q, k, v of this rank's heads and all tokens of its Ulysses group."""
    q_spans, kv_spans = [rank.q for rank in dealt], [rank.kv for rank in dealt]
    group = plan.place.ulysses
    if exchange == "packed":
        return HeadExchange([_made(q), _made(k), _made(v)], lengths, [q_spans, kv_spans, kv_spans], group).wait()
    assert exchange == "overlapped", f"exchange {exchange!r}: packed or overlapped"
    v_coming = HeadExchange([_made(v)], lengths, [kv_spans], group)
    q_coming = HeadExchange([_made(q)], lengths, [q_spans], group)
    k_coming = HeadExchange([_made(k)], lengths, [kv_spans], group)
    return [coming.wait()[0] for coming in (q_coming, k_coming, v_coming)]


def _made(given: Given) -> Tensor:
    return given if isinstance(given, Tensor) else given()


def _attend_whole(
    attend: AttendWithLse, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, joint: Joint | None
) -> tuple[Partial, Partial | None]:
    """Where all keys are here: one kernel call, in the order of one process."""
    if joint is None:
        return attend(q, k, v, mask), None
    out, lse = attend(joint.with_queries(q), *joint.with_keys(k, v, mask))
    (out, joint_out), (lse, joint_lse) = joint.split_rows(out), joint.split_rows(lse)
    return (out, lse), (joint_out, joint_lse)


def _attend_with(kernel: str, heads: Heads, lse: bool, bound: float | None) -> AttendWithLse:
    """One kernel call on this rank's heads. Without `lse` the log-sum-exp is an empty tensor."""

    def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
        if not heads.uniform:
            k, v = _one_per_query_head(k, heads), _one_per_query_head(v, heads)
        chosen = pick(kernel, need_of(q, k, mask, lse, bound))
        if lse:
            return chosen.with_lse(q, k, v, mask, bound=bound)
        return chosen(q, k, v, mask, bound=bound), q.new_empty(0, q.shape[1])

    return attend


def _one_per_query_head(x_BSHK: Tensor, heads: Heads) -> Tensor:
    """Key heads that are read unequally often, which no kernel can express, repeated for each query head."""
    return torch.cat([x_BSHK[:, :, j : j + 1].expand(-1, -1, n, -1) for j, n in enumerate(heads.reads)], 2)


def _mask_of(plan: Plan, ring_rank: int, key_mask_BS: Tensor | None) -> Tensor | None:
    """The mask of the keys that a ring rank holds, in its order."""
    if key_mask_BS is None:
        return None
    assert key_mask_BS.shape[1] == plan.tokens, f"a mask for {key_mask_BS.shape[1]} of {plan.tokens} keys"
    pieces = [key_mask_BS[:, span.start : span.stop] for span in plan.key_spans(ring_rank)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, 1)
