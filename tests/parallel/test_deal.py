"""The VAE on all ranks: the same bits as on one, each tile decoded once, few results held, and nobody left waiting."""

from __future__ import annotations

import deal_work as work
import numpy as np
import pytest
from PIL import Image

from diptych.codecs.video import decode_cost
from diptych.request import ClipRequest

pytestmark = pytest.mark.distributed

ROW = (1, 2, 16, 24)
CASES = {
    "windows": ((1, 8, 2, 2), False, 3),
    "fewer tiles than ranks": ((1, 4, 4, 6), False, 1),
    "a batch": ((2, 5, 2, 2), False, 4),
    "tiles in space": (ROW, True, 2),
}
"""Shape of the latents, whether the budget is small, and how many tiles that makes."""


def shares(counts, total):
    """Every piece once, spread evenly, the first rank never more than another."""
    return sum(counts) == total and max(counts) - min(counts) <= 1 and counts[0] == min(counts)


@pytest.fixture(scope="module")
def cases(tiny_base):
    cost = decode_cost(work.components(str(tiny_base)).vae)
    budget = 1 + int(cost.peak(2, 16, 16, 8 * 16, 8 * 24))  # room for tiles of 16 x 16 latents, not for the picture
    return {name: (shape, budget if small else None, tiles) for name, (shape, small, tiles) in CASES.items()}


@pytest.fixture(scope="module")
def on_one_rank(tiny_base, cases):
    return {name: work.decode(str(tiny_base), 1, shape, budget) for name, (shape, budget, _) in cases.items()}


@pytest.mark.parametrize("world", [2, 3, 4])
def test_frames_have_the_bits_of_one_rank(ranks, tiny_base, cases, on_one_rank, world):
    for name, (shape, budget, tiles) in cases.items():
        alone, decoded = on_one_rank[name]
        assert decoded == tiles
        assert alone.std() > 10
        results = ranks(world)(work.decode, str(tiny_base), world, shape, budget)
        assert np.array_equal(results[0][0], alone), name
        assert shares([count for _, count in results], tiles), name


@pytest.mark.parametrize("pictures", [1, 3])
@pytest.mark.parametrize("world", [2, 4])
def test_first_frames_have_the_bits_of_one_rank(ranks, tiny_base, world, pictures):
    noise = np.random.default_rng(0).integers(0, 256, (pictures, 32, 48, 3), dtype=np.uint8)
    requests = [
        ClipRequest("a red circle", image=Image.fromarray(pixels), width=48, height=32, frames=5, seed=seed)
        for seed, pixels in enumerate(noise)
    ]
    alone, _ = work.encode(str(tiny_base), 1, requests)
    results = ranks(world)(work.encode, str(tiny_base), world, requests)
    assert np.array_equal(results[0][0], alone)
    counts = [count for _, count in results]
    assert shares(counts, 3) if pictures == 3 else counts == [1] + [0] * (world - 1)


@pytest.mark.parametrize("pieces", [0, 1, 2, 3, 7])
def test_pieces_come_in_order_and_few_are_held(ranks, pieces):
    results = ranks(3)(work.deal, pieces)
    assert results[0][0] == list(range(pieces))
    assert shares([made for _, made, _, _ in results], pieces)
    assert all(most <= 2 for _, _, most, _ in results)


@pytest.mark.parametrize("at", [0, 2, 6])
def test_what_fails_on_the_first_rank_leaves_nobody_waiting(ranks, at):
    results = ranks(3)(work.deal, 7, at)
    assert results[0][3] == "this one"
    assert ranks(3)(work.deal, 7)[0][0] == list(range(7)), "and nothing stale is received later"


def test_a_picture_that_is_not_finite_is_refused_on_the_first_rank_only(ranks, tiny_base, cases, on_one_rank):
    shape, budget, _ = cases["windows"]
    results = ranks(2)(work.decode, str(tiny_base), 2, shape, budget, float("nan"))
    assert "not finite" in results[0][0]
    assert results[1][0] is None
    again = ranks(2)(work.decode, str(tiny_base), 2, shape, budget)
    assert np.array_equal(again[0][0], on_one_rank["windows"][0])
