"""The tile plan: a pure function that covers every pixel, equals diffusers' windows by default, and keeps a budget."""

from __future__ import annotations

import ast
import inspect

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diptych.codecs import tiles
from diptych.codecs.tiles import GIB, SMALLEST, SPACE, TIME, TileCost, plan_tiles, released_cost, whole_plan
from diptych.codecs.video import Canvas
from diptych.errors import RequestError

PIXELS = TileCost(fixed=0, per_pixel=1, per_pair=0)
"""A cost in which the budget is simply pixels and the canvas."""


def budget_for(t: int, y: int, x: int, Y: int, X: int) -> int:
    return int(PIXELS.peak(t, y, x, SPACE * Y, SPACE * X))


@st.composite
def shapes_and_budgets(draw, longest: int = 128, largest: int = 256):
    """Legal shapes (sides are multiples of 16 pixels) and budgets that a tile of some size just fits."""
    T, Y, X = (draw(st.integers(1, longest)), *(2 * draw(st.integers(1, largest // 2)) for _ in "YX"))
    y, x = draw(st.integers(SMALLEST, largest)), draw(st.integers(SMALLEST, largest))
    budget = draw(st.sampled_from([None, budget_for(min(T, 5), min(y, Y), min(x, X), Y, X)]))
    return T, Y, X, budget


def upsampled(latents_CTYX: torch.Tensor) -> torch.Tensor:
    """What a VAE would give that only upsamples: the first latent is one frame, each later one four."""
    repeats = torch.tensor([1] + [TIME] * (latents_CTYX.shape[1] - 1))
    picture = latents_CTYX.repeat_interleave(repeats, dim=1)
    return picture.repeat_interleave(SPACE, dim=2).repeat_interleave(SPACE, dim=3)


def blend(plan, latents_CTYX):
    canvas, frames = Canvas(plan), []
    for tile in plan.tiles:
        t, y, x = tile.t, tile.y, tile.x
        part = latents_CTYX[:, t.first : t.last, y.first : y.last, x.first : x.last]
        finished = canvas.add(tile, upsampled(part)[:, t.drop :].clone())
        if finished is not None:
            assert finished.low == sum(map(len, frames)), "windows finish frames in order, each once"
            assert bool(finished.finite)
            frames.append(finished.frames_FHWC.numpy())
    return np.concatenate(frames)


@settings(max_examples=25, deadline=None)
@given(shapes_and_budgets(longest=9, largest=56))
def test_an_upsampling_vae_gives_the_untiled_picture_for_every_size_and_budget(case):
    T, Y, X, budget = case
    try:
        plan = plan_tiles(T, Y, X, budget, PIXELS)
    except RequestError:
        return  # a budget below the smallest tiles; when that may be is the next test
    levels = torch.randint(0, 256, (3, T, Y, X), generator=torch.Generator().manual_seed(T * Y + X))
    frames = blend(plan, levels / 127.5 - 1)
    want = upsampled(levels).permute(1, 2, 3, 0).to(torch.uint8).numpy()
    assert np.array_equal(frames, want)


@settings(max_examples=100, deadline=None)
@given(shapes_and_budgets())
def test_weights_sum_to_one_everywhere_and_tiles_keep_the_budget(case):
    T, Y, X, budget = case
    smallest = budget_for(min(T, 5), min(Y, SMALLEST), min(X, SMALLEST), Y, X)
    try:
        plan = plan_tiles(T, Y, X, budget, PIXELS)
    except RequestError:
        assert budget is not None
        # Even spreading may leave tiles up to an overlap larger than the smallest.
        assert budget < 4 * smallest
        return
    for axis, size in (("t", plan.frames), ("y", plan.height), ("x", plan.width)):
        total = np.zeros(size)
        for span in {getattr(tile, axis) for tile in plan.tiles}:
            weight = np.ones(span.high - span.low)
            weight[: span.rise] = np.arange(span.rise) / max(span.rise, 1)
            weight[len(weight) - span.fall :] = 1 - np.arange(span.fall) / max(span.fall, 1)
            total[span.low : span.high] += weight
        assert np.allclose(total, 1)
    for tile in plan.tiles:
        t, y, x = (span.latents for span in (tile.t, tile.y, tile.x))
        assert budget is None or budget_for(t, y, x, Y, X) <= budget


@settings(max_examples=30, deadline=None)
@given(shapes_and_budgets())
def test_the_plan_is_a_function_of_its_arguments(case):
    T, Y, X, budget = case
    try:
        first = plan_tiles(T, Y, X, budget, PIXELS)
    except RequestError:
        return
    assert first == plan_tiles(T, Y, X, budget, PIXELS)


def test_the_planner_can_see_no_device():
    modules = [node for node in ast.walk(ast.parse(inspect.getsource(tiles))) if isinstance(node, ast.ImportFrom)]
    assert {node.module for node in modules} == {
        "__future__", "collections.abc", "dataclasses", "itertools", "diptych.errors"
    }  # fmt: skip
    assert not [node for node in ast.walk(ast.parse(inspect.getsource(tiles))) if isinstance(node, ast.Import)]


@pytest.mark.parametrize(
    ("T", "windows", "latents"),
    [(1, 1, 1), (4, 1, 4), (5, 2, 7), (6, 2, 8), (7, 2, 9), (31, 10, 49), (32, 11, 52)],
)
def test_windows_in_time_are_diffusers_less_those_that_add_nothing(T, windows, latents):
    plan = plan_tiles(T, 60, 108)
    assert len(plan.tiles) == windows
    assert sum(tile.t.latents for tile in plan.tiles) == latents
    assert {(tile.y.latents, tile.x.latents) for tile in plan.tiles} == {(60, 108)}


def test_a_budget_that_suffices_changes_nothing_and_a_smaller_one_tiles_in_space():
    assert plan_tiles(31, 60, 108, 24 * GIB) == plan_tiles(31, 60, 108)
    tiled = plan_tiles(31, 60, 108, 8 * GIB)
    assert len({(tile.y, tile.x) for tile in tiled.tiles}) > 1
    assert len({tile.t for tile in tiled.tiles}) == 10
    more = plan_tiles(31, 60, 108, 4 * GIB)
    assert len(more.tiles) > len(tiled.tiles)


def test_tiles_in_space_are_alike_and_overlap_by_64_pixels_at_least():
    plan = plan_tiles(31, 60, 108, 5 * GIB)
    rows = sorted({tile.y for tile in plan.tiles}, key=lambda span: span.low)
    assert len(rows) > 1
    assert len({span.latents for span in rows}) == 1
    assert all(span.rise >= 64 for span in rows[1:])
    assert [span.fall for span in rows[:-1]] == [span.rise for span in rows[1:]]


def test_the_model_of_memory_goes_through_both_measured_peaks():
    cost = released_cost()
    picture = (480, 864)
    assert cost.peak(5, 32, 32, *picture) / GIB == pytest.approx(4.7, abs=0.01)
    assert cost.peak(5, 60, 108, *picture) / GIB == pytest.approx(23.5, abs=0.01)
    double = released_cost(itemsize=4)
    assert double.peak(5, 60, 108, *picture) == pytest.approx(2 * cost.peak(5, 60, 108, *picture), rel=0.02)


def test_the_attention_mask_makes_large_pictures_dear():
    cost = released_cost()
    one_window = (5 * 136 * 240) ** 2 * 6
    assert cost.peak(5, 136, 240, 1088, 1920) > one_window > 80 * GIB


def test_a_budget_below_the_smallest_tiles_is_refused_with_what_would_do():
    with pytest.raises(RequestError, match=r"decode_memory = .0\.5GiB. .*takes at least \d\.\d\d GiB") as refusal:
        plan_tiles(31, 60, 108, GIB // 2)
    needed = float(str(refusal.value).split("at least ")[1].split(" ")[0])
    plan_tiles(31, 60, 108, int((needed + 0.01) * GIB))


def test_the_whole_plan_is_one_tile_without_seams():
    (tile,) = whole_plan(31, 60, 108).tiles
    assert (tile.t.latents, tile.y.latents, tile.x.latents) == (31, 60, 108)
    assert (tile.t.high, tile.y.high, tile.x.high) == (121, 480, 864)
    assert not any((tile.t.rise, tile.t.fall, tile.y.rise, tile.y.fall, tile.x.rise, tile.x.fall))


def test_tiles_out_of_order_are_refused():
    plan = plan_tiles(5, 2, 2)
    with pytest.raises(AssertionError, match="order"):
        Canvas(plan).add(plan.tiles[1], torch.zeros(3, 4, 16, 16))
