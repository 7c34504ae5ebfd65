"""Unified attention equals one process: whatever the ranks, lengths, heads, joint tokens, masks, caches and dtypes."""

from __future__ import annotations

import pytest
import torch
from attention_work import Case, attend, own_rows, split_joint, whole
from hypothesis import Phase, given, note, settings
from hypothesis import strategies as st
from reference import assert_close, attention

pytestmark = pytest.mark.distributed

LAYOUTS = [(1, 1), (2, 1), (1, 2), (3, 1), (1, 3), (4, 1), (1, 4), (2, 2)]
"""ring, ulysses"""


@st.composite
def cases(draw: st.DrawFn, ring: int, ulysses: int) -> Case:
    world = ring * ulysses
    patches: tuple[tuple[int, ...], ...] = ()
    part = st.tuples(*[st.integers(0, 9)] * world)
    if draw(st.integers(0, 3)) == 0:
        patches = tuple(draw(st.lists(part, min_size=1, max_size=3)))
        lengths = tuple(map(sum, zip(*patches, strict=True)))
    else:
        lengths = draw(part)
    kv_heads = draw(st.integers(1, 4))
    batch = draw(st.integers(1, 2))
    where = draw(st.sampled_from([None, "front", "rear"]))
    joint = draw(st.integers(0, 5)) if where else 0

    def mask(tokens: int) -> tuple[tuple[bool, ...], ...] | None:
        kind = draw(st.sampled_from(["none", "random", "nothing visible", "first part hidden"]))
        if kind == "none":
            return None
        if kind == "nothing visible":
            return ((False,) * tokens,) * batch
        if kind == "random":
            return tuple(draw(st.tuples(*[st.booleans()] * tokens)) for _ in range(batch))
        return tuple((False,) * (tokens // 2) + (True,) * (tokens - tokens // 2) for _ in range(batch))

    return Case(
        ring=ring,
        ulysses=ulysses,
        lengths=lengths,
        patches=patches,
        heads=kv_heads * draw(st.integers(1, 8 // kv_heads)),
        kv_heads=kv_heads,
        batch=batch,
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64])),
        where=where,
        joint=joint,
        mask=mask(sum(lengths)),
        joint_mask=mask(joint) if where else None,
        exchange=draw(st.sampled_from(["packed", "overlapped"])),
        seed=draw(st.integers(0, 99)),
    )


def check(case: Case, results: list[dict]) -> None:
    tensors = whole(case)
    q, k, v, mask = tensors.joined(case)
    parts = [split_joint(case, x) for x in attention(q, k, v, mask)]
    (joint_out, out), (joint_lse, lse) = parts
    for rank, result in enumerate(results):
        rows = own_rows(case, rank)
        assert_close(result["out"], result["lse"], (out[:, rows], lse[:, rows]), v, case.dtype)
        if case.where is None:
            assert result["joint"] is None
            continue
        assert_close(result["joint"], result["joint_lse"], (joint_out, joint_lse), v, case.dtype)
        assert torch.equal(result["joint"], results[0]["joint"]), "joint rows must have the same bits on every rank"
        assert torch.equal(result["joint_lse"], results[0]["joint_lse"])
    if case.ring == 1:
        assert all(result["bits of one process"] for result in results), "pure Ulysses must not change a bit"


@pytest.mark.parametrize(("ring", "ulysses"), LAYOUTS)
def test_equals_one_process(ranks, ring: int, ulysses: int) -> None:
    run = ranks(ring * ulysses)

    @given(case=cases(ring, ulysses))
    @settings(max_examples=40, deadline=None, derandomize=True, database=None, phases=[Phase.explicit, Phase.generate])
    def sweep(case: Case) -> None:
        note(f"{case}")
        check(case, run(attend, case))

    sweep()
