"""Caches on several ranks: every rank decides alike, and the clip is that of one rank."""

from __future__ import annotations

from functools import partial

import caches_work as work
import numpy as np
import pytest
from caches_work import CACHES, SIZE

from diptych.parallel import Layout
from diptych.request import ClipRequest
from diptych.sampling.caches import CachePlan

pytestmark = pytest.mark.distributed

LAYOUTS = ["cfg=2", "ulysses=2", "cfg=2,ulysses=2", "ring=4", "tensor=2", "cfg=2,shard=2"]
LONGER = SIZE | {"frames": 9, "steps": 11}


def requests() -> list[ClipRequest]:
    """One that is longer, and another after it."""
    return [ClipRequest("waves", **LONGER), ClipRequest("a red circle", **SIZE)]


@pytest.fixture(scope="module")
def jobs(engine):
    caches = [text for name, text in CACHES.items() if name != "cachedit"]  # its library takes seconds on each rank
    jobs = [(r, CachePlan.of(text, engine.checkpoint)) for text in caches for r in requests()]
    one_lane = ClipRequest("x", **SIZE, guidance=1.0, audio=False)
    return [*jobs, (one_lane, CachePlan.of(CACHES["firstblock"], engine.checkpoint))]


@pytest.fixture(scope="module")
def one_rank(tiny_base, jobs):
    return work.cached(None, str(tiny_base), jobs)


def test_a_request_skips_the_same_whatever_came_before(one_rank, tiny_base, jobs):
    alone = [work.cached(None, str(tiny_base), [job])[0] for job in jobs[1:-1:2]]
    for first, longer, after in zip(alone, one_rank[:-1:2], one_rank[1:-1:2], strict=True):
        assert first["cached"] == after["cached"]
        assert all(np.array_equal(a, b) for a, b in zip(first["latents"], after["latents"], strict=True))
        assert 0 < sum(lane["computed"] for lane in first["cached"]["lanes"]) < 2 * SIZE["steps"]
        assert [lane["total"] for lane in longer["cached"]["lanes"]] == [LONGER["steps"]] * 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_skips_what_one_rank_skips(layout, one_rank, tiny_base, jobs, ranks):
    """The longer request is left out but for firstblock: in every step of it the ranks have to agree."""
    chosen = [
        i for i, (asked, plan) in enumerate(jobs) if asked.steps == SIZE["steps"] or plan.settings.name == "firstblock"
    ]
    some = [jobs[i] for i in chosen]
    every = ranks(Layout.parse(layout).world)(work.cached, layout, str(tiny_base), some, seconds=240)
    for rank in every:
        for alone, here in zip([one_rank[i] for i in chosen], rank, strict=True):
            assert alone["cached"] == here["cached"]
            for a, b in zip(alone["latents"], here["latents"], strict=True):
                assert np.abs(a - b).max() <= (0 if layout == "cfg=2" else 5e-5)


def test_cache_dit_skips_what_it_skips_on_one_rank(engine, tiny_base, ranks):
    job = (requests()[1], CachePlan.of(CACHES["cachedit"] + ",order=1", engine.checkpoint))
    (alone,) = work.cached(None, str(tiny_base), [job])
    assert 0 < alone["cached"]["lanes"][0]["computed"] < SIZE["steps"]
    for (here,) in ranks(4)(work.cached, "cfg=2,ulysses=2", str(tiny_base), [job], seconds=240):
        assert alone["cached"] == here["cached"]
        for a, b in zip(alone["latents"], here["latents"], strict=True):
            assert np.abs(a - b).max() <= 5e-5


@pytest.mark.parametrize("layout", ["ulysses=2", "cfg=2,ulysses=2"])
def test_ranks_that_see_different_changes_decide_alike(layout, engine, tiny_base, ranks):
    """The threshold lies between what the ranks see of their own tokens: each on its own, one would compute and wait
    for ever in the attention that the other skips."""
    request = ClipRequest("a red circle", **(SIZE | {"steps": 5}), audio=False)
    run = partial(ranks(Layout.parse(layout).world), seconds=60)
    exact = CachePlan.of("firstblock:0,4,0", engine.checkpoint)
    one, other = (rank["local"][0] for rank in run(work.first_block, str(tiny_base), layout, request, exact)[:2])
    assert abs(one - other) > 1e-4
    between = CachePlan.of(f"firstblock:{(one + other) / 2},4,0", engine.checkpoint)
    every = run(work.first_block, str(tiny_base), layout, request, between)
    local = [rank["local"][0] for rank in every[:2]]
    assert min(local) < (one + other) / 2 < max(local)
    assert all(rank["cached"] == every[0]["cached"] for rank in every)


def test_ranks_record_what_one_rank_records(engine, tiny_base, ranks):
    job = (ClipRequest("a red circle", **(SIZE | {"steps": 4})), CachePlan.of("record", engine.checkpoint))
    (alone,) = work.cached(None, str(tiny_base), [job])
    for (rank,) in ranks(4)(work.cached, "cfg=2,ulysses=2", str(tiny_base), [job]):
        for name, values in alone["cached"]["recorded"].items():
            np.testing.assert_allclose(rank["cached"]["recorded"][name], values, rtol=1e-4)
