"""Guidance on two halves: every rank gets the bits that one process computes."""

from __future__ import annotations

import pytest
import torch
from parallel_work import draw, exchange_velocities

from diptych.parallel import CONDITIONAL, UNCONDITIONAL, Layout, guided

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize("layout", [Layout(cfg=2), Layout(cfg=2, ulysses=2), Layout(cfg=2, ring=2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_one_process(ranks, layout: Layout, dtype: torch.dtype) -> None:
    g = 5.0
    results = ranks(layout.world)(exchange_velocities, layout, dtype, g)
    assert [result["lane"] for result in results] == [CONDITIONAL] * layout.sequence + [UNCONDITIONAL] * layout.sequence
    for result in results:
        for i, n in enumerate((7, 5)):
            cond, uncond = draw(i, 2, n, 3, dtype=dtype).float(), draw(10 + i, 2, n, 3, dtype=dtype).float()
            assert torch.equal(result["combined"][i], uncond + g * (cond - uncond))


def test_each_velocity_travels_once_in_its_own_dtype(ranks) -> None:
    for result in ranks(2)(exchange_velocities, Layout(cfg=2), torch.bfloat16, 5.0):
        assert [(sent.collective, sent.bytes) for sent in result["sent"]] == [
            ("all_gather_into_tensor", 2 * (7 + 5) * 3 * 2)
        ]


def test_guided_is_not_a_weighted_sum() -> None:
    """The other way to write it, one that an all-reduce could compute, has other bits."""
    cond, uncond = draw(0, 1000), draw(1, 1000)
    assert not torch.equal(guided(cond, uncond, 5.0), 5.0 * cond + (1 - 5.0) * uncond)
