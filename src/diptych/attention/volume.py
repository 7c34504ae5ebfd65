"""Bytes a rank sends in one attention, computed: what `collectives.Traffic` counts.

For S tokens of width D on W = U * R ranks, sizes that divide, and b bytes a number:

    Ulysses   4 (W - 1)/W * S/W * D * b
    ring      2 (W - 1) * S/W * D * b
    both      4 (U - 1)/U * S/W * D * b + 2 (R - 1) * S/R * D/U * b
"""

from __future__ import annotations

from diptych.attention.plan import Plan, deal_heads


def attention_bytes(
    plan: Plan, *, heads: int, kv_heads: int, head_dim: int, itemsize: int, batch: int = 1, joint_rows: int = 0
) -> int:
    """Bytes this rank sends to others in one `unified_attention` without cache or log-sum-exp; exact if uneven too."""
    place = plan.place
    dealt = deal_heads(heads, kv_heads, place.ulysses.size)
    own, u = dealt[place.ulysses.rank], place.ulysses.rank
    group = plan.in_ring(plan.lengths, place.ring.rank)
    others = [rank for rank in range(place.ulysses.size) if rank != u]
    to_heads = sum(dealt[rank].q.size + 2 * dealt[rank].kv.size for rank in others) * group[u]
    to_tokens = sum(group[rank] for rank in others) * own.q.size
    R = place.ring.size
    # at step i this rank passes on the keys of the rank i places before it
    passed_on = sum(plan.ring_lengths[(place.ring.rank - step) % R] for step in range(R - 1))
    to_ring = 2 * own.kv.size * passed_on
    to_joint = len(others) * max(rank.q.size for rank in dealt) * joint_rows
    return (to_heads + to_tokens + to_ring + to_joint) * batch * head_dim * itemsize


def merge_bytes(ranks: int, *, queries: int, heads: int, head_dim: int, itemsize: int, batch: int = 1) -> int:
    """Bytes a rank sends to merge attention of replicated queries over split keys: outputs and float32 log-sum-exps."""
    return (ranks - 1) * batch * queries * heads * (head_dim * itemsize + 4)


def gather_bytes(plan: Plan, *, channels: int, itemsize: int, batch: int = 1) -> int:
    """Bytes a rank sends to give every rank all tokens; shards are padded to the longest."""
    return (plan.place.world - 1) * batch * max(plan.lengths) * channels * itemsize
