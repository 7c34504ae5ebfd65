"""Layouts are read, written, and refused with a sentence that helps."""

from __future__ import annotations

import pytest
from parallel_work import coordinates, mesh_error

from diptych.errors import LayoutError
from diptych.parallel import Layout


@pytest.mark.parametrize(
    ("text", "layout", "world"),
    [
        ("cfg=2,ulysses=4", Layout(cfg=2, ulysses=4), 8),
        (" ulysses = 8 ", Layout(ulysses=8), 8),
        ("ring=3", Layout(ring=3), 3),
        ("ulysses=2,ring=2,cfg=2", Layout(cfg=2, ring=2, ulysses=2), 8),
        ("cfg=1,tensor=1", Layout(), 1),
        ("tensor=2,ulysses=2,shard=2", Layout(tensor=2, ulysses=2, shard=2), 4),
        ("cfg=2,ring=2,shard=4", Layout(cfg=2, ring=2, shard=4), 4),
        ("single", Layout(), 1),
        ("cfg=2,pipeline=2,ring=3", Layout(cfg=2, pipeline=2, ring=3), 12),
    ],
)
def test_parse(text: str, layout: Layout, world: int) -> None:
    assert Layout.parse(text) == layout
    assert layout.world == world
    assert Layout.parse(str(layout)) == layout


def test_str_leaves_ones_out() -> None:
    assert str(Layout(ulysses=4, cfg=2)) == "cfg=2,ulysses=4"
    assert str(Layout()) == "single"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("ulyses=4", "layout axis 'ulyses' is not accepted: did you mean ulysses?"),
        ("x=4", "layout axis 'x' is not accepted: axes are cfg, pipeline, tensor, ring, ulysses, shard."),
        ("ulysses", "layout 'ulysses' is not accepted: write axis=ranks, as in cfg=2,ulysses=4, or single."),
        ("", "layout '' is not accepted: write axis=ranks, as in cfg=2,ulysses=4, or single."),
        ("ring=2,ring=2", "layout 'ring=2,ring=2' is not accepted: ring is given twice."),
        ("ring=two", "layout ring = 'two' is not accepted: a whole number of ranks, 1 or more."),
        ("ring=0", "layout ring = 0 is not accepted: a whole number of ranks, 1 or more."),
        ("ring=-1", "layout ring = '-1' is not accepted: a whole number of ranks, 1 or more."),
        ("cfg=4", "layout cfg = 4 is not accepted: 1, or 2 for the two passes of guidance."),
        (
            "ulysses=4,shard=8",
            "layout shard = 8 is not accepted: it adds no ranks but parts the weights among those that cfg, ring and "
            "ulysses make (4 here), and divides their number; write ulysses=2,shard=2.",
        ),
        (
            "tensor=2,shard=2",
            "layout shard = 2 is not accepted: it adds no ranks but parts the weights among those that cfg, ring and "
            "ulysses make (1 here), and divides their number; write ulysses=2,shard=2.",
        ),
    ],
)
def test_refusals_say_what_would_be_accepted(text: str, sentence: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout.parse(text)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("value", [True, 2.0, "2"])
def test_only_whole_numbers(value: object) -> None:
    with pytest.raises(LayoutError, match="a whole number of ranks"):
        Layout(ring=value)  # type: ignore[arg-type]


def test_no_process_group_is_said() -> None:
    with pytest.raises(LayoutError, match="layout ring=2 needs a process group of 2 ranks, and none is running"):
        Layout(ring=2).mesh("cpu")


@pytest.mark.distributed
def test_another_number_of_ranks_is_said(ranks) -> None:
    sentence = "layout cfg=2,ulysses=2 needs 4 ranks, 3 are running."
    assert ranks(3)(mesh_error, Layout(cfg=2, ulysses=2)) == [sentence] * 3


@pytest.mark.distributed
@pytest.mark.parametrize(
    "layout", [Layout(cfg=2, ulysses=2), Layout(cfg=2, ring=2), Layout(ring=2, ulysses=2), Layout(ulysses=4)], ids=str
)
def test_ranks_are_numbered_cfg_first_then_ring(ranks, layout: Layout) -> None:
    for rank, (c, r, u, in_sequence) in enumerate(ranks(4)(coordinates, layout)):
        assert rank == (c * layout.ring + r) * layout.ulysses + u
        assert in_sequence == r * layout.ulysses + u
