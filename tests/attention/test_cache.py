"""Patch pipelining: at every patch, fresh keys for it and before it, stale ones behind it; each exactly once."""

from __future__ import annotations

import pytest
import torch
from attention_work import Case, own_rows, pipelined_step, split_joint, whole
from reference import attention

from diptych.attention import Group, Place, Plan
from diptych.attention.cache import patch_major


def case_of(ring: int, ulysses: int, patches: tuple[tuple[int, ...], ...], **more) -> Case:
    lengths = tuple(map(sum, zip(*patches, strict=True)))
    return Case(ring=ring, ulysses=ulysses, lengths=lengths, patches=patches, **more)


MASK = ((True, False, True, True, False, True, True, True, False, True, True),)
CASES = {
    "U2 P2": case_of(1, 2, ((3, 3), (3, 3))),
    "U2 P4": case_of(1, 2, ((3, 3),) * 4),
    "U4 P4": case_of(1, 4, ((3, 3, 3, 3),) * 4),
    "U3 P2, uneven": case_of(1, 3, ((4, 3, 3), (2, 1, 1)), heads=5, kv_heads=5),
    "U2 P3, a rank without tokens of one patch": case_of(1, 2, ((3, 2), (1, 0), (2, 3)), mask=MASK),
    "R2 P2": case_of(2, 1, ((4, 3), (2, 2)), mask=MASK),
    "R2 U2 P3": case_of(2, 2, ((3, 2, 2, 2), (1, 1, 1, 1), (4, 3, 3, 3)), heads=3, kv_heads=3),
    "R2 U2 P2, joint in front": case_of(2, 2, ((3, 2, 2, 2), (2, 2, 2, 1)), where="front", joint=3),
    "U2 P2, joint at the rear": case_of(1, 2, ((3, 2), (2, 2)), where="rear", joint=2),
    "bfloat16": case_of(1, 2, ((3, 3), (3, 3)), dtype=torch.bfloat16),
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", sorted(CASES, key=lambda name: CASES[name].world))
def test_every_patch_sees_fresh_and_stale_keys_once(ranks, name: str) -> None:
    case = CASES[name]
    results = ranks(case.world)(pipelined_step, case)
    warm, fresh = whole(case), whole(case, seed=1)
    limit = 1e-6 if case.dtype == torch.float32 else 2e-2
    k, v = warm.k.clone(), warm.v.clone()  # what one process would have in its cache
    for step in range(len(case.patches) + 1):
        q = warm.q
        if step:
            rows = sorted(row for rank in range(case.world) for row in own_rows(case, rank, step - 1))
            k[:, rows], v[:, rows] = fresh.k[:, rows], fresh.v[:, rows]
            q = fresh.q
        now = whole(case, seed=min(step, 1))
        now.q, now.k, now.v = q, k, v
        joint, expected = split_joint(case, attention(*now.joined(case))[0])
        for rank, of_rank in enumerate(results):
            rows = own_rows(case, rank, None if step == 0 else step - 1)
            error = (of_rank[step]["out"].double() - expected[:, rows]).abs()
            assert error.numel() == 0 or float(error.max()) <= limit, f"patch {step - 1} on rank {rank}"
            if case.where is not None:
                assert float((of_rank[step]["joint"].double() - joint).abs().max()) <= limit
                assert torch.equal(of_rank[step]["joint"], results[0][step]["joint"])


@pytest.mark.parametrize(
    ("patches", "lost"),
    [
        (((3, 3), (3, 3)), [3, 0]),
        (((3, 3),) * 4, [3, 6, 3, 0]),
        (((3, 3, 3, 3),) * 4, [9, 12, 9, 0]),
    ],
)
def test_why_not_rank_major(patches: tuple[tuple[int, ...], ...], lost: list[int]) -> None:
    """Written over a rank-major store, a patch would overwrite tokens of others; over ours it never does."""
    U = len(patches[0])
    plan = Plan.patched(Place(ulysses=Group("", U, 0)), patches)
    arrival = torch.tensor([[p, u] for u in range(U) for p in range(len(patches)) for _ in range(patches[p][u])])
    ours = patch_major(arrival[None], plan)[0]
    for store, losses in ((arrival.clone(), lost), (ours.clone(), [0] * len(patches))):
        for patch, loss in enumerate(losses):
            start, stop = plan.patch_span(patch)
            store[start:stop, 0] = -1 - patch  # fresh tokens of this patch
            stale = sum(int((store[:, 0] == later).sum()) for later in range(patch + 1, len(patches)))
            expected = sum(sum(patches[later]) for later in range(patch + 1, len(patches)))
            assert expected - stale == loss
