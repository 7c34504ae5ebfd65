"""What a plan promises: nothing that is said to fit exceeds the memory, and nothing given makes it slower."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from diptych.codecs.tiles import decode_peak, fused_cost, released_cost
from diptych.errors import LayoutError
from diptych.memory.budget import slack
from diptych.memory.footprint import GIB, Setting, footprint, transformer_weights
from diptych.memory.precision import EXACT, FP8, Precision
from diptych.parallel.layout import Layout
from diptych.planner.cards import CARDS
from diptych.planner.choices import SAME, Limits, layouts_of, plan
from diptych.planner.cost import forward
from diptych.planner.draw import held, save
from diptych.planner.machine import Machine, machine_of
from diptych.planner.options import pick_bytes
from diptych.planner.rates import Rates
from diptych.planner.task import task_of
from diptych.planner.tell import options_of
from diptych.request import MAX_TEXT_TOKENS

cards = st.sampled_from(sorted(CARDS))
models = st.sampled_from(["pro", "lite", "pro-distill", "lite-distill"])
geometries = st.sampled_from(["864x480x125", "432x256x25", "1280x720x121", "512x768x121"])


def of(model="pro", gpus="8xH100-80", geometry="864x480x125", clips=1, **limits):
    return plan(task_of(model, geometry, clips=clips), machine_of(gpus), Limits(**limits))


@settings(max_examples=15, deadline=None)
@given(
    model=models, card=cards, count=st.sampled_from([1, 2, 3, 4]), geometry=geometries, clips=st.sampled_from([1, 5])
)
def test_what_fits_never_exceeds_the_memory(model, card, count, geometry, clips):
    """Predicted anew from the setting that was chosen, for the longest prompt, with the decode that was chosen."""
    found = of(model, f"{count}x{card}", geometry, clips)
    size = replace(found.task.size, L=MAX_TEXT_TOKENS)
    cost = fused_cost() if found.rates.fused else released_cost()
    for choice in found.fitting:
        decode = decode_peak(size.T, size.Y, size.X, choice.decode, cost)
        predicted = footprint(found.task.config, size, choice.setting, decode=decode, parts=found.task.parts)
        assert predicted.peak <= found.budget - slack(found.budget), choice
        assert choice.cards <= count
    for choice in found.choices:
        assert choice.fits or choice.why
        assert choice.fits or choice not in found.fitting


@settings(max_examples=10, deadline=None)
@given(model=models, card=cards, count=st.integers(1, 4), tenths=st.integers(60, 1300))
def test_the_printed_memory_is_enough_for_the_plan(model, card, count, tenths):
    """What `--memory` is told to be, read again, gives the engine's own planner as much as was planned with."""
    for choice in of(model, f"{count}x{card}", budget=tenths * GIB // 10 + 12_345).fitting:
        words = options_of(choice)
        if "--memory" in words:
            told = pick_bytes("memory", words[words.index("--memory") + 1])
            assert choice.first.peak <= told - slack(told) and told <= choice.budget


@settings(max_examples=6, deadline=None)
@given(model=models, card=cards, geometry=geometries, clips=st.sampled_from([1, 2, 7]))
def test_more_cards_are_never_slower(model, card, geometry, clips):
    """But for the share below which two ways count as equally fast."""
    before = None
    for count in (1, 2, 3, 4, 6):
        best = of(model, f"{count}x{card}", geometry, clips).best
        if before is not None:
            assert best is not None and best.total <= before.total * (1 + SAME)
        before = best or before


@settings(max_examples=10, deadline=None)
@given(model=models, card=cards, count=st.sampled_from([1, 2, 4]), low=st.integers(4, 60), more=st.integers(0, 60))
def test_more_memory_is_never_slower(model, card, count, low, more):
    small = of(model, f"{count}x{card}", budget=low * GIB).best
    large = of(model, f"{count}x{card}", budget=(low + more) * GIB).best
    assert small is None or (large is not None and large.total <= small.total * (1 + SAME))


@settings(max_examples=8, deadline=None)
@given(model=models, card=cards, count=st.sampled_from([1, 2, 4]))
def test_a_longer_clip_takes_longer(model, card, count):
    short, long = (of(model, f"{count}x{card}", f"864x480x{frames}").choices for frames in (61, 121))
    fastest = [min(choice.total for choice in choices) for choices in (short, long)]
    assert fastest[0] < fastest[1]


def test_exact_before_approximate_before_what_does_not_fit():
    found = of()
    kinds = [(choice.fits, choice.exact) for choice in found.choices]
    assert kinds == sorted(kinds, reverse=True)
    assert {(True, True), (True, False), (False, True)} <= set(kinds)
    assert found.best is found.choices[0]


def test_fp8_is_weighed_on_hopper_alone():
    for gpus, there in (("1xH200", True), ("1x4090", False), ("1xB200", False), ("1xA100", False)):
        assert any(not choice.exact for choice in of(gpus=gpus).choices) is there, gpus


def test_the_layouts_are_those_that_can_be_built_and_have_work_for_all():
    task = task_of("lite", "864x480x125")
    for world in (1, 2, 4, 8):
        found = list(layouts_of(world, task))
        assert len(set(found)) == len(found)
        assert all(layout.world == world for layout in found)
        assert Layout(ulysses=world) in found
        assert world == 1 or Layout(cfg=2, ulysses=world // 2) in found
    distilled = task_of("lite-distill", "864x480x125")
    assert all(layout.cfg == 1 for layout in layouts_of(8, distilled))
    assert all(layout.ulysses <= 28 for layout in layouts_of(56, distilled))


def test_several_clips_are_made_side_by_side():
    """Eight cards that hold the whole model each make eight clips without sending anything."""
    one, eight = (of("lite-distill", "8xH200", clips=clips).best for clips in (1, 8))
    assert (one.replicas, one.layout.world) == (1, 8)
    assert (eight.replicas, eight.layout.world) == (8, 1)
    assert of("lite-distill", "8xH200", clips=3).best.replicas <= 3


def test_borrowed_weights_are_counted_while_they_are_there():
    """A rank that keeps an eighth of the weights still has whole blocks beside it while it computes."""
    layouts = (Layout(ulysses=8), Layout(ulysses=8, shard=8))
    kept, shared = (of(gpus="8xH200", layout=layout, offload="none").choices[0] for layout in layouts)
    blocks, whole = (choice.others.phases["denoise"] for choice in (shared, kept))
    assert blocks.weights < whole.weights / 4
    assert blocks.work > whole.work + 2 * (whole.weights - blocks.weights) / 60


def test_what_is_fixed_stays():
    layout = Layout(ring=2, ulysses=2)
    for choice in of(layout=layout, precision=FP8, offload="model", modulation="tables").choices:
        s = choice.setting
        assert (choice.layout, s.precision, s.offload, s.modulation) == (layout, FP8, "model", "tables")


def test_blocks_and_steps_that_stay_exact_take_what_exact_ones_take():
    """Blocks: seconds and bytes; steps: the seconds of attention. All of them: the figures of an exact run."""

    def figures(text, **axes):
        precision = Precision.parse(text)
        limits = {"layout": Layout(**axes), "offload": "none", "modulation": "resident"}
        choice = of(gpus="2xH200", precision=precision, **limits).choices[0]
        return choice.seconds.denoise, choice.first.phases["denoise"].weights

    texts = ("exact", "fp8:first=20,last=20", "fp8:first=1,last=1", "fp8")
    seconds, weights = zip(*(figures(text) for text in texts), strict=True)
    assert list(seconds) == sorted(set(seconds), reverse=True)
    assert list(weights) == sorted(set(weights), reverse=True)
    assert (weights[2] - weights[3]) * 20 == weights[1] - weights[3], "2 and 40 of 60 blocks"
    assert seconds[2] - seconds[3] == pytest.approx((seconds[0] - seconds[3]) / 30)
    whole = figures("fp8:first=30,last=30")
    assert whole == (pytest.approx(seconds[0]), weights[0])
    few, all_steps = figures("fp8:5"), figures("fp8:50")
    assert few[1] == all_steps[1] == weights[3]
    assert few[0] - seconds[3] == pytest.approx((all_steps[0] - seconds[3]) / 10)
    piped = [figures(text, pipeline=2)[0] for text in ("fp8:1", "fp8:steps=1,first=1", "exact")]
    assert figures("fp8", pipeline=2)[0] < piped[0] < piped[1] < piped[2]


def test_streamed_blocks_of_two_sizes_are_counted_each():
    """A bus that is far too narrow: the time of a forward is that of the bytes."""
    task, machine = task_of("pro", "512x512x5"), machine_of("1xH200")
    rates = replace(Rates.of(machine.card, machine.link), bus=1e9)

    def streamed(text, resident):
        setting = Setting(precision=Precision.parse(text), offload="block", modulation="tables", resident=resident)
        return forward(task.config, task.size, setting, rates).total * 1e9

    large, small = (transformer_weights(task.config, Setting(precision=p)).block for p in (EXACT, FP8))
    assert streamed("fp8", 0) == pytest.approx(60 * small)
    assert streamed("fp8:first=10,last=10", 0) == pytest.approx(40 * small + 20 * large)
    assert streamed("fp8:first=10,last=10", 30) == pytest.approx(20 * small + 10 * large), "every second one"


def test_a_layout_that_the_machine_or_the_model_cannot_have_is_refused():
    with pytest.raises(LayoutError, match="layout ulysses=16 takes 16 GPUs, and 8xh100-80 has 8"):
        of(layout=Layout(ulysses=16))
    with pytest.raises(LayoutError, match="a distilled checkpoint has no guidance to split"):
        of("pro-distill", layout=Layout(cfg=2))


def test_a_machine_with_too_little_host_memory_is_told():
    task, machine = task_of("pro", "864x480x125"), machine_of("1x4090")
    small = Machine(card=machine.card, count=1, host_memory=32 * GIB)
    found = plan(task, small)
    assert found.best is None
    assert any("needs 81 GiB of host memory, 32 are there" in choice.why for choice in found.choices)


def test_cards_that_would_not_help_stay_idle():
    """A tiny clip on PCIe: sending costs more than it saves."""
    best = of("lite-distill", "8xT4", "64x64x5").best
    assert best.cards < 8


@pytest.mark.parametrize(
    "text", ["cfg=2,ulysses=4", "ring=2,ulysses=2,tensor=2", "ring=8", "cfg=2,pipeline=2,ulysses=2"]
)
def test_a_drawing_shows_every_token_and_head_once(text):
    """In each pass of guidance, each stage: what the ranks are said to hold makes up the whole."""
    found = of("lite", layout=Layout.parse(text))
    layout, config, tokens = found.choices[0].layout, found.task.config, found.task.size.tokens
    ranks = held(found, found.choices[0])
    for lane in range(layout.cfg):
        for stage in {has.blocks for has in ranks}:
            here = [has for has in ranks if has.lane == lane and has.blocks == stage]
            assert len(here) == layout.world // layout.cfg // layout.pipeline
            cells = sum(has.tokens.size for has in {has.tokens: has for has in here}.values())
            assert cells == tokens
            heads = [head for span in {has.heads for has in here} for head in range(*span)]
            assert sorted(heads) == list(range(config.heads))
    blocks = [block for span in {has.blocks for has in ranks} for block in range(*span)]
    assert sorted(blocks) == list(range(config.num_visual_blocks))


def test_a_drawing_says_that_it_shows_an_approximation(tmp_path, monkeypatch):
    titles = []
    monkeypatch.setattr(Figure, "suptitle", lambda self, title, **_: titles.append(title.splitlines()[1]))
    for limits in ({}, {"text_precision": "nf4"}):
        found = of("lite", **limits)
        save(found, found.best, tmp_path / "plan.png")
    assert [title.partition(":")[0] for title in titles] == ["Best", "Best, an approximation as asked for"]


def test_pipefusion_is_weighed_and_never_best_where_something_exact_fits():
    found = of("lite", "8xT4")
    piped = [choice for choice in found.choices if choice.layout.pipeline > 1]
    assert piped and not any(choice.exact for choice in piped)
    assert found.best.layout.pipeline == 1
    fitting = [choice for choice in piped if choice.fits]
    assert all(choice.setting.offload != "block" for choice in fitting)


def test_pipefusion_keeps_keys_and_gains_only_after_its_whole_steps():
    """Two steps are both computed whole: stages then only wait for each other."""
    layouts = (Layout(), Layout(pipeline=4))
    (one, four) = (of("lite-distill", "4xH200", layout=layout, precision=EXACT).choices[0] for layout in layouts)
    assert one.seconds.denoise / 4 < four.seconds.denoise < one.seconds.denoise
    few, machine = task_of("lite-distill", "864x480x125", steps=2), machine_of("4xH200")
    limits = [Limits(layout=layout, precision=EXACT) for layout in layouts]
    (one, four) = (plan(few, machine, limit).choices[0] for limit in limits)
    assert four.seconds.denoise > one.seconds.denoise
    single = of("lite-distill", "4xH200", layout=Layout(pipeline=2), precision=EXACT).choices[0]
    assert single.others.phases["denoise"].work - one.others.phases["denoise"].work == 16 * 2 * 51_840 * 2688 * 2


def test_without_guidance_there_is_no_second_pass_to_split():
    """`cfg=2` is refused by nobody, and wins nothing: both halves compute the one pass there is."""
    plain, machine = task_of("lite", "864x480x125", guidance=1.0), machine_of("4xH200")
    for rest in ({}, {"pipeline": 2}):
        limits = [Limits(layout=Layout(cfg=cfg, **rest), precision=EXACT) for cfg in (1, 2)]
        (one, two) = (plan(plain, machine, limit).choices[0] for limit in limits)
        assert two.seconds.denoise == pytest.approx(one.seconds.denoise)
