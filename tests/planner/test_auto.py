"""`layout auto` takes the layout of the best plan for what is there."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diptych.errors import LayoutError
from diptych.memory.footprint import GIB
from diptych.memory.precision import EXACT
from diptych.parallel.layout import Layout
from diptych.planner.auto import auto_layout
from diptych.planner.choices import Limits, plan
from diptych.planner.machine import Gpu, machine_of
from diptych.planner.task import task_of

H200 = Gpu("NVIDIA H200", 140 * GIB, "570", (9, 0))
T4 = Gpu("Tesla T4", 15 * GIB, "570", (7, 5))
STRANGE = Gpu("NVIDIA Z9", 96 * GIB, "999", (13, 0))
KEPT = Limits(precision=EXACT, offload="none", modulation="resident")


def test_it_is_the_layout_that_diptych_plan_calls_best():
    task = task_of("pro")
    for count in (1, 2, 4, 8):
        best = plan(task, machine_of(f"{count}xH200"), KEPT).best
        assert auto_layout(task, [H200] * count, KEPT) == best.layout
        assert best.layout.world == count


def test_guidance_is_split_before_tokens_are():
    assert auto_layout(task_of("pro"), [H200] * 2, KEPT) == Layout(cfg=2)
    assert auto_layout(task_of("pro-distill"), [H200] * 2, KEPT) == Layout(ulysses=2)


def test_ranks_that_others_started_all_get_work():
    for world in (2, 3, 4, 6):
        assert auto_layout(task_of("lite"), [H200] * world, KEPT, world=world).world == world
        assert auto_layout(task_of("lite-distill"), [], KEPT, world=world).world == world
    small = task_of("lite-distill", "64x64x5")  # for which one card would be as fast
    assert auto_layout(small, [H200] * 8, KEPT).world < 8
    assert auto_layout(small, [H200] * 8, KEPT, world=8).world == 8


def test_a_cpu_is_one_rank():
    assert auto_layout(task_of("lite"), [], KEPT) == Layout()


def test_a_card_that_is_not_in_the_table_is_planned_by_its_memory():
    assert auto_layout(task_of("pro"), [STRANGE] * 4, KEPT).world == 4
    with pytest.raises(LayoutError, match="layout auto finds none for 1xNVIDIA Z9"):
        auto_layout(task_of("pro"), [Gpu("NVIDIA Z9", 24 * GIB, "999", (13, 0))], KEPT)


def test_where_nothing_fits_it_says_what_would():
    with pytest.raises(
        LayoutError, match=r"finds none for 1xt4: single needs [\d.]+ GiB .*; single, float16, offload \w+"
    ):
        auto_layout(task_of("lite"), [T4], KEPT)
    with pytest.raises(LayoutError, match="not even with --offload block"):
        auto_layout(task_of("pro"), [T4], Limits(budget=2 * GIB))


def test_what_would_fit_is_called_an_approximation_where_it_is_one():
    h100, task = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, "570", (9, 0)), task_of("pro")
    tight = replace(KEPT, budget=13 * GIB)
    with pytest.raises(LayoutError, match=r"modulation tables fits\.$"):
        auto_layout(task, [h100], replace(tight, budget=20 * GIB))
    with pytest.raises(LayoutError, match=r"text nf4.* fits, which is an approximation\.$"):
        auto_layout(task, [h100], replace(tight, text_precision="nf4"))
