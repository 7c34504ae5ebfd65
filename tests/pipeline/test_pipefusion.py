"""PipeFusion: exact in warm-up, then of exactly the staleness that it promises, on every split."""

from __future__ import annotations

import pytest
import torch
from pipe_work import MODEL, Case, piped, plain, simulated

from diptych.attention import Group, Place
from diptych.memory.footprint import Setting, Size, footprint
from diptych.parallel import Layout
from diptych.parallel.patches import PatchShard

pytestmark = pytest.mark.distributed

CASES = {
    "sound, guided": Case(guided=True),
    "from an image, two clips": Case(image=True, batch=2, patches=4),
    "no sound, two steps of warm-up": Case(audio=0, warmup=2, patches=2),
}


@pytest.fixture(scope="module")
def expected() -> dict[str, list]:
    return {name: simulated(case) for name, case in CASES.items()}


def apart(a, b) -> float:
    pairs = [(x, y) for mine, theirs in zip(a, b, strict=True) for x, y in zip(mine, theirs, strict=True)]
    assert all((x is None) == (y is None) for x, y in pairs)
    return max(float((x - y).abs().max()) for x, y in pairs if x is not None)


@pytest.mark.parametrize("layout", ["pipeline=2", "pipeline=4", "pipeline=2,ulysses=2", "pipeline=2,ring=2"])
def test_the_staleness_is_that_of_one_process(layout: str, expected, ranks) -> None:
    for name, case in CASES.items():
        results = ranks(Layout.parse(layout).world)(piped, layout, case)
        for rank in results:
            assert apart(rank["velocities"], expected[name]) <= 5e-6, name
            assert apart(rank["velocities"], results[0]["velocities"]) == 0, "ranks differ"
            assert rank["held"] == rank["own"], "a stage holds other blocks than its own"


@pytest.mark.parametrize("text", ["pipeline=2", "pipeline=2,ulysses=2", "cfg=2,pipeline=2"])
def test_what_is_kept_is_what_is_predicted(text: str, ranks) -> None:
    """By the stage with the most blocks, 3 of 5, of one pass where two halves have one each; its ranks share the
    tokens, or the heads."""
    case, layout = CASES["sound, guided"], Layout.parse(text)
    T, Y, X = case.grid
    size = Size(T=T, Y=Y, X=X, A=case.audio, lanes=2)
    settings = [Setting(itemsize=4, cfg=layout.cfg, pipeline=stages) for stages in (2, 1)]
    with_, without = (footprint(MODEL, size, setting, decode=0).phases["denoise"].work for setting in settings)
    kept = [rank["kept"] for rank in ranks(layout.world)(piped, text, case)]
    assert sum(kept[: layout.world // layout.cfg // layout.pipeline]) == with_ - without


def test_guidance_on_two_halves(expected, ranks) -> None:
    name = "sound, guided"
    for rank in ranks(4)(piped, "cfg=2,pipeline=2", CASES[name]):
        assert apart(rank["velocities"], expected[name]) <= 5e-6


def test_it_matters() -> None:
    """What the other tests compare is far from exact, and was exact before."""
    for name, case in CASES.items():
        stale, exact = simulated(case), plain(case)
        assert apart(stale[: case.warmup], exact[: case.warmup]) == 0, name
        assert apart(stale[case.warmup :], exact[case.warmup :]) > 1e-3, name


@pytest.mark.parametrize("layout", ["pipeline=2", "pipeline=4", "pipeline=2,ulysses=2"])
def test_nothing_but_warm_up_is_exact_to_the_bit(layout: str, ranks) -> None:
    case = Case(guided=True, audio=0 if "ulysses" in layout else 7, warmup=4)
    exact = plain(case)
    for rank in ranks(Layout.parse(layout).world)(piped, layout, case):
        assert apart(rank["velocities"], exact) == 0


@pytest.mark.parametrize(("size", "patches", "world"), [(45, 4, 1), (45, 4, 4), (7, 8, 3), (2, 3, 1)])
def test_patches_cover_the_sequence_once(size: int, patches: int, world: int) -> None:
    order = []
    for rank in range(world):
        ulysses = Group("u", world, rank)
        shard = PatchShard(size, patches, Place(ulysses=ulysses, sequence=ulysses))
        own = shard.scatter(torch.arange(size), 0)
        assert len(own) == shard.size(None) == sum(shard.size(p) for p in range(shard.patches))
        order.append([own[shard.own(p)] for p in range(shard.patches)])
    assert shard.patches == max(1, min(patches, size // world))
    whole = torch.cat([of_rank[p] for p in range(shard.patches) for of_rank in order])
    assert torch.equal(whole, torch.arange(size))
