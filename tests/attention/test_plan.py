"""Who holds what: whole numbers that add up, however uneven."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from diptych.attention import Group, Joint, Place, Plan, split
from diptych.attention.plan import deal_heads


def place(ring: int, ulysses: int, rank: int) -> Place:
    r, u = divmod(rank, ulysses)
    return Place(Group("r", ring, r), Group("u", ulysses, u), Group("s", ring * ulysses, rank))


@given(st.integers(0, 10**6), st.integers(1, 64))
def test_split_is_even_and_larger_first(total: int, parts: int) -> None:
    sizes = split(total, parts)
    assert sum(sizes) == total
    assert sizes == tuple(sorted(sizes, reverse=True))
    assert max(sizes) - min(sizes) <= 1


@given(st.integers(0, 8), st.integers(1, 8), st.integers(1, 16))
def test_every_query_head_is_dealt_once_with_the_key_head_it_reads(group: int, kv_heads: int, ranks: int) -> None:
    heads = group * kv_heads
    dealt = deal_heads(heads, kv_heads, ranks)
    assert [head for rank in dealt for head in range(rank.q.start, rank.q.stop)] == list(range(heads))
    for rank in dealt:
        read = [j for j, n in zip(range(rank.kv.start, rank.kv.stop), rank.reads, strict=True) for _ in range(n)]
        assert read == [head // group for head in range(rank.q.start, rank.q.stop)]
        assert min(rank.reads, default=1) > 0


@given(st.lists(st.tuples(*[st.integers(0, 5)] * 4), min_size=1, max_size=4))
def test_patches_of_all_ring_ranks_cover_the_sequence(patches: list[tuple[int, ...]]) -> None:
    plan = Plan.patched(place(2, 2, 0), tuple(patches))
    keys = [key for r in range(2) for span in plan.key_spans(r) for key in range(span.start, span.stop)]
    assert sorted(keys) == list(range(plan.tokens))
    assert [sum(span.size for span in plan.key_spans(r)) for r in range(2)] == list(plan.ring_lengths)


def test_ranks_are_ring_major() -> None:
    assert [place(2, 3, rank).rank for rank in range(6)] == list(range(6))
    plan = Plan.even(place(2, 3, 4), 20)
    assert plan.lengths == (4, 4, 3, 3, 3, 3)
    assert (plan.span.start, plan.span.stop) == (14, 17)
    assert plan.ring_lengths == (11, 9)


def test_joint_tokens_stand_in_front_or_at_the_rear() -> None:
    x = torch.zeros(1, 2, 1, 4)
    with pytest.raises(ValueError, match="where = 'middle' is not accepted: front or rear"):
        Joint(x, x, x, where="middle")  # type: ignore[arg-type]


def test_lengths_must_fit_the_ranks() -> None:
    with pytest.raises(AssertionError, match="3 lengths for 2 ranks"):
        Plan(place(2, 1, 0), (1, 2, 3))
    with pytest.raises(AssertionError, match="patches add up to"):
        Plan(place(2, 1, 0), (3, 3), ((1, 1), (1, 2)))
