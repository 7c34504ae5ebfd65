"""One clip, however it is laid out: every layout of up to four ranks against one rank, float32."""

from __future__ import annotations

import layouts_work as work
import numpy as np
import pytest
from test_parity import picture

from diptych.parallel import Layout
from diptych.request import ClipRequest

pytestmark = pytest.mark.distributed

LAYOUTS = [
    "ulysses=2",
    "ulysses=3",
    "ulysses=4",
    "ring=2",
    "ring=3",
    "ring=4",
    "ring=2,ulysses=2",
    "cfg=2",
    "cfg=2,ulysses=2",
    "cfg=2,ring=2",
]
BASE = {"width": 48, "height": 32, "frames": 9, "steps": 3, "seed": 7}
ODD = {"width": 80, "height": 48, "frames": 9}  # 3 x 3 x 5 = 45 tokens
CASES = {
    "even tokens": [ClipRequest("a red circle", **BASE)],
    "odd tokens": [ClipRequest("a red circle", **(BASE | ODD))],
    "image": [ClipRequest("a red circle", **BASE, image=picture(48, 32))],
    "video only": [ClipRequest("a red circle", **(BASE | ODD), audio=False)],
    "masked text in a batch": [
        ClipRequest("a red circle", **BASE),
        ClipRequest("a large blue square moves slowly to the left", **(BASE | {"seed": 8})),
    ],
    "fewer tokens than ranks": [ClipRequest("a red circle", **(BASE | {"width": 16, "height": 16, "frames": 5}))],
}
DISTILLED = [[ClipRequest("a red circle", **(BASE | {"steps": 6}))]]
EXACT = {("cfg=2", case) for case in CASES} | {(f"ulysses={n}", "video only") for n in (2, 3, 4)}
EXACT |= {("cfg=2,ulysses=2", "video only")}
"""Nothing is merged by log-sum-exp there, so nothing may differ at all."""


@pytest.fixture(scope="module")
def one_rank(tiny_base):
    return work.clips(None, str(tiny_base), list(CASES.values()))


@pytest.fixture(scope="module")
def distilled_on_one_rank(tiny_distilled):
    return work.clips(None, str(tiny_distilled), DISTILLED)


def check(case, layout, alone, ranks):
    """5e-6 on the velocity, 2e-5 on final latents, 1/255 on frames; all ranks agree on the velocity to the bit."""
    exact = (layout, case) in EXACT
    for rank in ranks:
        for mine, theirs, first in zip(alone["velocity"], rank["velocity"], ranks[0]["velocity"], strict=True):
            if mine is None:
                assert theirs is None
                continue
            assert np.abs(mine).max() > 0.5, "the velocity must say something"
            assert np.abs(mine - theirs).max() <= (0 if exact else 5e-6)
            assert np.array_equal(theirs, first), "ranks differ"
    assert all(rank["clips"] is None for rank in ranks[1:])
    for mine, theirs in zip(alone["clips"], ranks[0]["clips"], strict=True):
        for name, latents in mine.latents.items():
            assert np.abs(latents - theirs.latents[name]).max() <= (0 if exact else 2e-5)
        assert np.abs(mine.frames.astype(int) - theirs.frames).max() <= (0 if exact else 1)
        assert mine.report["forwards"] == theirs.report["forwards"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_gives_the_clip_of_one_rank(layout, one_rank, tiny_base, ranks):
    every = ranks(Layout.parse(layout).world)(work.clips, layout, str(tiny_base), list(CASES.values()), seconds=240)
    for index, case in enumerate(CASES):
        check(case, layout, one_rank[index], [rank[index] for rank in every])


WITHOUT_CFG = [layout for layout in LAYOUTS if "cfg" not in layout]


@pytest.mark.parametrize("layout", WITHOUT_CFG)
def test_distilled(layout, distilled_on_one_rank, tiny_distilled, ranks):
    every = ranks(Layout.parse(layout).world)(work.clips, layout, str(tiny_distilled), DISTILLED, seconds=240)
    check("distilled", layout, distilled_on_one_rank[0], [rank[0] for rank in every])


@pytest.mark.parametrize("layout", WITHOUT_CFG)
def test_28_and_14_heads(layout, ranks):
    alone = work.lite_velocity(None)
    for rank in ranks(Layout.parse(layout).world)(work.lite_velocity, layout, seconds=240):
        for mine, theirs in zip(alone, rank, strict=True):
            assert np.abs(mine).max() > 0.5
            assert np.abs(mine - theirs).max() <= 5e-6
