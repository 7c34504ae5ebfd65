"""Merging parts of an attention, also where a part sees no key."""

from __future__ import annotations

import itertools

import torch
from reference import attention

from diptych.attention import NO_KEY, LocalAttend, Role
from diptych.attention.merge import merge

q, k, v = torch.randn(3, 2, 12, 2, 8, generator=torch.Generator().manual_seed(0)).unbind(0)


def parts(mask: torch.Tensor, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    chunks = zip(k.chunk(count, 1), v.chunk(count, 1), mask.chunk(count, 1), strict=True)
    return [LocalAttend().with_lse(Role.VISUAL_SELF, q, *chunk) for chunk in chunks]


def test_dead_parts_first_middle_last_and_in_any_order() -> None:
    """The shorter recurrence fails from three parts on, and only where the first is dead."""
    for dead in itertools.product([False, True], repeat=4):
        mask = torch.ones(2, 12, dtype=torch.bool)
        for part, is_dead in enumerate(dead):
            mask[:, 3 * part : 3 * part + 3] = not is_dead
        expected, expected_lse = attention(q, k, v, mask)
        for order in itertools.permutations(parts(mask, 4)):
            out, lse = merge(order, torch.float32)
            assert float((out - expected).abs().max()) <= 1e-6
            if all(dead):
                assert not out.any()
                assert (lse <= NO_KEY * 0.99).all()
            else:
                assert float((lse - expected_lse).abs().max()) <= 2e-6


def test_a_dead_part_changes_no_bit() -> None:
    alive = parts(torch.ones(2, 12, dtype=torch.bool), 1)[0]
    dead = (torch.full_like(alive[0], 7.0), torch.full_like(alive[1], NO_KEY))
    for order in ([alive], [alive, dead], [dead, alive], [dead, alive, dead]):
        out, lse = merge(order, torch.float32)
        assert torch.equal(out, alive[0])
        assert torch.equal(lse, alive[1])


def test_scores_too_large_for_exp_are_no_trouble() -> None:
    big = [(out, lse + 1e4) for out, lse in parts(torch.ones(2, 12, dtype=torch.bool), 3)]
    out, _ = merge(big, torch.float32)
    assert float((out - attention(q, k, v)[0]).abs().max()) <= 1e-3  # float32 holds 1e4 to about 1e-3
