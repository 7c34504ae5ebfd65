"""What is sent: the bytes of the formulas, in as few collectives as they need, and nothing else."""

from __future__ import annotations

import pytest
from attention_work import Case, attend, events, place_from_groups, wrong_groups

from diptych.attention import Group, Place, Plan, attention_bytes

pytestmark = pytest.mark.distributed


def place_at(case: Case, rank: int) -> Place:
    r, u = divmod(rank, case.ulysses)
    return Place(Group("r", case.ring, r), Group("u", case.ulysses, u), Group("s", case.world, rank))


def test_ulysses_sends_4_w_minus_1_over_w_squared(ranks) -> None:
    S, H, K, b, W = 64, 8, 8, 4, 4
    for result in ranks(W)(attend, Case(1, W, (S // W,) * W, heads=H, kv_heads=H), False):
        assert [sent.collective for sent in result["sent"]] == ["all_to_all_single"] * 2
        assert sum(sent.bytes for sent in result["sent"]) == 4 * (W - 1) * (S // W) * (H * K // W) * b


def test_a_ring_sends_2_w_minus_1_over_w(ranks) -> None:
    S, H, K, b, W = 64, 8, 8, 4, 4
    for result in ranks(W)(attend, Case(W, 1, (S // W,) * W, heads=H, kv_heads=H), False):
        assert [sent.bytes for sent in result["sent"]] == [2 * (S // W) * H * K * b] * (W - 1)


def test_both_at_once(ranks) -> None:
    S, H, K, b, U, R = 64, 8, 8, 4, 2, 2
    D = H * K
    for result in ranks(U * R)(attend, Case(R, U, (S // 4,) * 4, heads=H, kv_heads=H), False):
        expected = 4 * (U - 1) * (S // (U * R)) * (D // U) * b + 2 * (R - 1) * (S // R) * (D // U) * b
        assert sum(sent.bytes for sent in result["sent"]) == expected


def test_grouped_key_heads_travel_once(ranks) -> None:
    """Six query heads read two key heads: of each of its 5 tokens a rank sends 3 + 1 + 1 heads, and gets 3 back."""
    s, K, b = 5, 8, 4
    for result in ranks(2)(attend, Case(1, 2, (s, s), heads=6, kv_heads=2), False):
        assert [sent.bytes for sent in result["sent"]] == [s * (3 + 1 + 1) * K * b, s * 3 * K * b]


def test_a_ring_passes_nothing_on_in_its_last_step(ranks) -> None:
    assert [len(result["sent"]) for result in ranks(2)(attend, Case(2, 1, (4, 4)), False)] == [1, 1]


CASES = {
    "uneven tokens and heads": Case(1, 3, (5, 3, 4), heads=5, kv_heads=5, batch=2),
    "grouped heads stay compact": Case(1, 3, (5, 3, 4), heads=6, kv_heads=2),
    "more ranks than heads": Case(1, 4, (2, 2, 2, 1), heads=2, kv_heads=2),
    "uneven ring": Case(3, 1, (5, 0, 4), heads=2, kv_heads=1),
    "joint keys never travel, joint rows only as results": Case(3, 1, (3, 3, 3), where="front", joint=50),
    "joint rows come back from the other heads": Case(1, 3, (3, 3, 3), heads=4, where="rear", joint=50),
    "both, uneven": Case(2, 2, (3, 5, 1, 4), heads=3, kv_heads=3, where="front", joint=7),
    "a mask is not sent": Case(2, 2, (3, 5, 1, 4), mask=((True,) * 13,)),
}


@pytest.mark.parametrize("name", sorted(CASES, key=lambda name: CASES[name].world))
def test_bytes_are_known_beforehand(ranks, name: str) -> None:
    case = CASES[name]
    for rank, result in enumerate(ranks(case.world)(attend, case, False)):
        plan = Plan(place_at(case, rank), case.lengths)
        expected = attention_bytes(
            plan,
            heads=case.heads,
            kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            itemsize=4,
            batch=case.batch,
            joint_rows=case.joint,
        )
        assert sum(sent.bytes for sent in result["sent"]) == expected


def test_a_joint_token_costs_a_ring_nothing(ranks) -> None:
    alone = ranks(3)(attend, Case(3, 1, (3, 3, 3)), False)
    joint = ranks(3)(attend, Case(3, 1, (3, 3, 3), where="front", joint=50), False)
    assert [result["sent"] for result in joint] == [result["sent"] for result in alone]


def test_a_ring_starts_the_next_transfer_before_it_attends(ranks) -> None:
    for of_rank in ranks(3)(events, Case(3, 1, (4, 4, 4), heads=2, kv_heads=2)):
        assert of_rank[3:] == ["start", "attend", "wait", "start", "attend", "wait", "attend"]


def test_overlapped_exchange_starts_v_then_q_then_k_and_waits_last(ranks) -> None:
    for of_rank in ranks(2)(events, Case(1, 2, (4, 4), exchange="overlapped")):
        makes = ["make v", "start", "make q", "start", "make k", "start"]
        assert of_rank == [*makes, "wait", "wait", "wait", "attend", "start", "wait"]


def test_packed_exchange_is_one_collective(ranks) -> None:
    for of_rank in ranks(2)(events, Case(1, 2, (4, 4))):
        assert of_rank == ["make q", "make k", "make v", "start", "wait", "attend", "start", "wait"]


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 2), (2, 2)])
def test_explicit_groups_are_as_good_as_a_mesh(ranks, ring: int, ulysses: int) -> None:
    assert all(ranks(ring * ulysses)(place_from_groups, ring, ulysses))


def test_ranks_numbered_otherwise_are_refused(ranks) -> None:
    sentences = ranks(4)(wrong_groups)
    assert "ring-major, needs 4 ranks and number 2 here" in sentences[1]
