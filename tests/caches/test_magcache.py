"""MagCache's schedule: known before the first step, from nothing but ratios and counts."""

from __future__ import annotations

import pytest

from diptych.request import ClipDefaults, ClipRequest
from diptych.sampling.caches.calibration import published, resample
from diptych.sampling.caches.magcache import MagCacheSettings, magcache_plan

PRO = ClipDefaults(steps=50, guidance=5.0, distilled=False, has_audio=True, has_image=True)
RATIOS = published().known(ClipRequest("x").resolve(PRO)).ratios


def computed(lane: list[bool]) -> list[int]:
    return [step for step, runs in enumerate(lane) if runs]


@pytest.mark.parametrize(
    ("threshold", "max_run", "retention", "forwards"),
    [(0.12, 2, 0.2, 48), (0.12, 1, 0.2, 60), (0.24, 2, 0.2, 46), (0.12, 2, 0.1, 42), (0.24, 3, 0.1, 32)],
)
def test_published_ratios_of_pro_compute_so_many_of_100(threshold, max_run, retention, forwards):
    plan = magcache_plan(RATIOS, MagCacheSettings(threshold, max_run, retention))
    assert sum(sum(lane) for lane in plan) == forwards


def test_the_default_schedule_step_by_step():
    for lane in magcache_plan(RATIOS, MagCacheSettings()):
        assert computed(lane) == [*range(10), *range(12, 49, 3), 49]


def test_each_lane_reads_its_own_ratios():
    flat, jump = [1.0] * 10, [1.0] * 6 + [1.5] + [1.0] * 3
    cond, uncond = magcache_plan([flat, jump], MagCacheSettings(0.12, 9, 0.1))
    assert computed(cond) == [0]
    assert computed(uncond) == [0, 6]


def test_errors_add_up_over_a_run_and_start_anew_after_it():
    """Ratios of 1.1 give products 1.1, 1.21: errors 0.1, then 0.31."""
    plan = magcache_plan([[1.0] + [1.1] * 8], MagCacheSettings(0.3, 9, 0.05))
    assert computed(plan[0]) == [0, 2, 4, 6, 8]
    plan = magcache_plan([[1.0] + [1.1] * 8], MagCacheSettings(0.32, 9, 0.05))
    assert computed(plan[0]) == [0, 3, 6]


def test_without_guidance_the_count_goes_on_in_twos():
    one, two = magcache_plan(RATIOS[:1], MagCacheSettings()), magcache_plan(RATIOS, MagCacheSettings())
    assert one[0] == two[0]


def test_nothing_is_predicted_before_something_was_computed():
    assert magcache_plan([[1.0, 1.0]], MagCacheSettings(retention=0.0))[0] == [True, False]


def test_last_steps_can_be_held_back():
    assert computed(magcache_plan([[1.0] * 10], MagCacheSettings(max_run=99, retention=0.1, last=2))[0]) == [0, 8, 9]


def test_other_step_counts_take_the_nearest_ratio_of_their_lane():
    assert resample([0, 1, 2, 3, 4], 3) == [0, 2, 4]
    assert resample([0, 1, 2], 6) == [0, 0, 1, 1, 2, 2]
    assert resample([7, 8, 9], 1) == [9]
    known = published().known(ClipRequest("x", steps=20).resolve(PRO))
    assert [len(lane) for lane in known.ratios] == [20, 20]
    assert [lane[-1] for lane in known.ratios] == [0.84200656, 0.83657581]
