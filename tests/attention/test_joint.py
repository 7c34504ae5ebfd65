"""Joint tokens count once, wherever they stand, and are the same on every rank."""

from __future__ import annotations

import pytest
import torch
from attention_work import Case, attend, own_rows, split_joint, whole
from reference import attention

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("where", ["front", "rear"])
@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (3, 1), (2, 2), (4, 1)])
def test_joint_keys_are_counted_once(ranks, ring: int, ulysses: int, where: str) -> None:
    """Rotated with the others they would count once a source: their share of the weight shows it."""
    case = Case(ring, ulysses, (3,) * (ring * ulysses), where=where, joint=4, dtype=torch.float64, heads=2, kv_heads=2)
    q, k, v, _ = whole(case).joined(case)
    is_joint = torch.zeros_like(v)
    split_joint(case, is_joint)[0].fill_(1.0)
    share = split_joint(case, attention(q, k, is_joint)[0])[1][..., :1]  # of the weight, on joint keys
    joint_out, own_out = (split_joint(case, attention(*part)[0])[1] for part in _parts(case))
    expected = share * joint_out + (1 - share) * own_out
    for rank, result in enumerate(ranks(case.world)(attend, case)):
        assert float((result["out"] - expected[:, own_rows(case, rank)]).abs().max()) <= 1e-13


def _parts(case: Case) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    tensors = whole(case)
    q = tensors.joined(case)[0]
    return [(q, tensors.joint_k, tensors.joint_v), (q, tensors.k, tensors.v)]


@pytest.mark.parametrize("where", ["front", "rear"])
@pytest.mark.parametrize(("ring", "ulysses"), [(1, 2), (1, 4), (2, 1), (3, 1), (4, 1), (2, 2)])
def test_joint_rows_have_the_same_bits_on_every_rank(ranks, ring: int, ulysses: int, where: str) -> None:
    """At sizes where kernels block and vectorise differently for different numbers of rows."""
    world = ring * ulysses
    lengths = tuple(160 + 7 * rank for rank in range(world))
    case = Case(ring, ulysses, lengths, where=where, joint=37, heads=3, kv_heads=3, head_dim=64)
    results = ranks(world)(attend, case)
    for result in results[1:]:
        assert torch.equal(result["joint"], results[0]["joint"])
        assert torch.equal(result["joint_lse"], results[0]["joint_lse"])
    if ring == 1:
        assert all(result["bits of one process"] for result in results)
