"""Every path is one graph without a break, also where sizes are uneven."""

from __future__ import annotations

import shutil

import pytest
from attention_work import Case, compiled, compiled_patch, order_in_graph

pytestmark = pytest.mark.distributed

MASK = ((True, False, True, True, True, False, True, True, False),)
CASES = {
    "Ulysses": Case(1, 2, (4, 4)),
    "ring": Case(2, 1, (4, 4)),
    "uneven, fewer heads than ranks": Case(1, 3, (5, 4, 3), heads=2, kv_heads=2),
    "ring of three, a source all masked": Case(3, 1, (3, 3, 3), mask=((False,) * 3 + (True,) * 6,)),
    "joint in front, masked": Case(1, 2, (5, 4), where="front", joint=3, mask=MASK),
    "joint at the rear of a ring": Case(2, 1, (5, 4), where="rear", joint=3, mask=MASK),
    "grouped heads, unequal groups": Case(1, 2, (5, 4), heads=6, kv_heads=2, exchange="overlapped"),
    "grouped heads read unevenly": Case(1, 4, (3, 2, 2, 2), heads=6, kv_heads=2),
    "2 x 2": Case(2, 2, (2, 2, 2, 2)),
    "2 x 2, uneven, joint, masked": Case(
        2, 2, (3, 2, 2, 2), heads=3, kv_heads=3, where="front", joint=2, mask=MASK, joint_mask=((True, False),)
    ),
    "warm-up of a cache": Case(1, 2, (5, 4), patches=((3, 2), (2, 2))),
}


@pytest.mark.parametrize("name", sorted(CASES, key=lambda name: CASES[name].world))
def test_one_graph(ranks, name: str) -> None:
    case = CASES[name]
    for result in ranks(case.world)(compiled, case):
        assert (result["graphs"], result["breaks"]) == (1, 0)
        assert result["error"] <= 2e-6


def test_a_pipelined_patch_is_one_graph(ranks) -> None:
    for result in ranks(2)(compiled_patch, CASES["warm-up of a cache"]):
        assert (result["graphs"], result["breaks"]) == (1, 0)
        assert result["error"] <= 2e-6


def test_a_ring_keeps_its_order_in_the_graph(ranks) -> None:
    """The usual wrappers wait at once while traced, and nothing would overlap."""
    for order in ranks(3)(order_in_graph, Case(3, 1, (3, 4, 3))):
        assert order == ["start", "attend", "wait", "start", "attend", "wait", "attend"]


@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_inductor_compiles_it_whole(ranks) -> None:
    case = CASES["joint at the rear of a ring"]
    for result in ranks(2)(compiled, case, "inductor", seconds=120):
        assert (result["graphs"], result["breaks"]) == (1, 0)
        assert result["error"] <= 2e-6
