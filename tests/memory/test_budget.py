"""A budget is held by every plan, and one that cannot be held is refused with what would do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diptych.bench.geometry import random_transformer
from diptych.codecs.tiles import decode_peak, fused_cost
from diptych.errors import RequestError
from diptych.memory import fp8
from diptych.memory.budget import CHUNKS, OFFLOADS, Planner, shown
from diptych.memory.footprint import GIB, RELEASED, Setting, Size, activations, footprint, transformer_weights
from diptych.memory.precision import EXACT, FP8, Precision
from diptych.memory.tables import is_modulation
from diptych.model.config import LITE, PRO, TINY
from diptych.parallel.stages import stage_blocks

ROOT = Path(__file__).parents[2]
CLIP = Size(T=32, Y=60, X=108, A=225, L=200, lanes=2, steps=50)
LONG = Size(T=61, Y=90, X=160, A=432, L=1024, lanes=2, steps=50)
BUDGETS = [2, 4, 6, 6.5, 8, 10, 12, 14.5, 20, 24, 32, 34, 40, 48, 72, 80, 100, 140]


def decode(budget: int | None) -> int:
    return decode_peak(32, 60, 108, budget, fused_cost())


@pytest.mark.parametrize(
    "precision", ["exact", "fp8", "fp8:first=1", "fp8:first=1,last=1", "fp8:last=3"], ids=lambda text: text
)
@pytest.mark.parametrize("config", [TINY, TINY.distilled()], ids=["base", "distilled"])
def test_weights_are_counted_to_the_byte(config, precision):
    precision = Precision.parse(precision)
    model = random_transformer(config, torch.device("cpu"), torch.float16)
    if precision.kind == "fp8":
        fp8.quantise(model, exact_first=precision.first, exact_last=precision.last)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    bytes_of = {name: t.numel() * t.element_size() for name, t in tensors.items()}
    setting = Setting(itemsize=2, precision=precision, modulation_itemsize=2 if config.grid > 1 else 4)
    weights = transformer_weights(config, setting)
    blocks = [0] * config.num_visual_blocks
    for name, count in bytes_of.items():
        if name.startswith("visual_transformer_blocks.") and not is_modulation(name):
            blocks[int(name.split(".")[1])] += count
    assert weights.each == tuple(blocks)
    for stages in (2, 3):
        most = max(sum(blocks[n] for n in stage_blocks(3, stages, stage)) for stage in range(stages))
        assert sum(transformer_weights(config, replace(setting, pipeline=stages)).each) == most
    assert weights.modulation == sum(n for name, n in bytes_of.items() if is_modulation(name))
    assert weights.total == sum(bytes_of.values())


def measured(section: str, label: str) -> dict:
    return json.loads((ROOT / "benchmarks" / "results" / "offload-2026-11-30.json").read_text())[section][label]


@pytest.mark.parametrize(
    ("section", "label", "config", "changes"),
    [
        ("pro", "block, 20 GiB", PRO, {"offload": "block"}),
        ("pro", "block, 14.5 GiB, 8 chunks", PRO, {"offload": "block", "chunks": 8}),
        ("fp8", "block, 32 GiB", PRO, {"offload": "block", "precision": FP8}),
        ("lite", "model, 10 GiB", LITE, {"offload": "model"}),
    ],
)
def test_an_h200_took_no_more_than_predicted_and_at_most_five_percent_less(section, label, config, changes):
    took = measured(section, label)
    size = Size(T=32, Y=60, X=108, A=230, L=200)
    plan = Planner(config, RELEASED).plan(
        size, Setting(modulation="tables", **changes), lambda budget: 0, int(took["cap GiB"] * GIB)
    )
    assert plan.setting.chunks == took["chunks"]
    if plan.setting.offload == "block":
        assert plan.setting.resident == took["resident blocks"]
    predicted = plan.footprint.phases["denoise"].peak / GIB
    assert took["allocated GiB"] <= predicted <= 1.05 * took["allocated GiB"]
    assert took["reserved GiB"] <= took["cap GiB"]


def test_host_memory_is_what_was_predicted():
    for section, config, precision in (("pro", PRO, EXACT), ("fp8", PRO, FP8), ("lite", LITE, EXACT)):
        weights = transformer_weights(config, Setting(precision=precision))
        assert (weights.total - weights.modulation) / GIB == pytest.approx(measured(section, "host")["GiB"], rel=1e-3)


@pytest.mark.parametrize("offload", OFFLOADS)
@pytest.mark.parametrize("precision", [EXACT, FP8, Precision("fp8", first=2, last=3)], ids=str)
@pytest.mark.parametrize("size", [CLIP, LONG], ids=["5 s", "long and large"])
@pytest.mark.parametrize("config", [PRO, LITE], ids=["pro", "lite"])
def test_a_plan_holds_its_budget_and_more_of_it_keeps_more(config, size, precision, offload):
    planner, setting = Planner(config, RELEASED), Setting(precision=precision, offload=offload, modulation="tables")
    least = planner.least(size, setting, decode)
    before = None
    for gib in BUDGETS:
        plan = planner.plan(size, setting, decode, int(gib * GIB))
        assert (plan is not None) == (gib * GIB >= least)
        if plan is None:
            continue
        assert plan.footprint.peak <= gib * GIB
        assert plan.decode is not None and decode(plan.decode) <= gib * GIB
        if before is not None:
            assert plan.setting.resident >= before.resident or plan.setting.chunks < before.chunks
            assert plan.setting.chunks <= before.chunks
            assert before.language_streamed or not plan.setting.language_streamed
        before = plan.setting


def test_the_promises_of_the_documents():
    """Pro, 864x480, 125 frames: what 80, 24, 16 GB cards and fp8 on 32 GiB are planned with."""
    planner = Planner(PRO, RELEASED)

    def within(gib, **changes):
        plan = planner.plan(CLIP, replace(Setting(), **changes), decode, int(gib * GIB))
        return plan and plan.setting

    assert within(72, offload="none") is None and within(72, offload="model")
    assert within(20, offload="model") is None and within(20, offload="block").chunks == 1
    assert within(14.5, offload="block") and within(32, offload="block", precision=FP8).resident >= 45
    assert Planner(LITE, RELEASED).plan(CLIP, Setting(offload="model"), decode, 10 * GIB)


def test_without_a_limit_block_keeps_nothing_and_model_everything():
    planner = Planner(PRO, RELEASED)
    block = planner.plan(CLIP, Setting(offload="block"), decode, None)
    assert block.setting.resident == 0 and block.setting.language_streamed and block.setting.chunks == 1
    weights = transformer_weights(PRO, Setting())
    assert block.footprint.phases["denoise"].weights == weights.outer + 2 * weights.block
    model = planner.plan(CLIP, Setting(offload="model"), decode, None)
    assert model.footprint.phases["denoise"].weights == weights.total
    assert block.footprint.host == model.footprint.host == weights.total + RELEASED.total


def test_text_encoders_are_never_beside_the_transformer():
    for offload in ("model", "block"):
        phases = footprint(PRO, CLIP, Setting(offload=offload), decode=0).phases
        assert phases["text"].weights == RELEASED.language + RELEASED.clip
        assert phases["picture"].weights == 0


def test_the_first_mode_that_fits_is_chosen():
    planner = Planner(PRO, RELEASED)
    chosen = [planner.choose(CLIP, Setting(), decode, gib * GIB).setting.offload for gib in (100, 72, 40, 8)]
    assert chosen == ["none", "model", "block", "block"]


def test_parts_of_the_sequence_take_less_until_attention_is_what_takes_most():
    widest = []
    for chunks in CHUNKS:
        work = activations(PRO, CLIP, Setting(chunks=chunks))
        widest.append(max(work["attention"], work["feed_forward"]))
    assert widest[1] < widest[0] and widest == sorted(widest, reverse=True)
    assert widest[-1] == activations(PRO, CLIP, Setting())["attention"]


def test_a_block_that_stays_exact_works_with_exact_tensors():
    """The widest of both kinds: attention in fp8 also holds the rounded three, a feed-forward in parts holds less."""
    kinds = (EXACT, FP8, Precision("fp8", first=1))
    exact, quantised, both = (activations(PRO, CLIP, Setting(precision=kind, chunks=8)) for kind in kinds)
    assert quantised["attention"] > exact["attention"] and quantised["feed_forward"] < exact["feed_forward"]
    assert both == {name: max(exact[name], quantised[name]) for name in exact}
    assert activations(PRO, CLIP, Setting(precision=Precision("fp8", 0, 30, 30), chunks=8)) == exact


@pytest.mark.parametrize(
    ("budget", "offload", "words"),
    [
        (20, "none", "takes at least 83.6 GiB with offload none; --offload block fits."),
        (72, "none", "takes at least 83.6 GiB with offload none; --offload model fits."),
        (20, "model", "with offload model; --offload block fits."),
        (3, "model", "with offload model, and 6.4 GiB with --offload block."),
        (3, "block", "takes at least 6.4 GiB with offload block; ask for a smaller or shorter clip."),
    ],
)
def test_a_budget_that_is_too_small_is_refused_with_what_would_do(budget, offload, words):
    planner, setting = Planner(PRO, RELEASED), Setting(offload=offload)
    assert planner.plan(CLIP, setting, decode, budget * GIB) is None
    told = str(planner.refusal(CLIP, setting, decode, budget * GIB))
    assert told.startswith(f"memory = '{budget}GiB' is not accepted: 864x480 in 125 frames ") and words in told


@pytest.mark.parametrize(("axes", "able"), [({"shard": 4}, ["none"]), ({"pipeline": 4}, ["none", "model"])])
def test_only_what_the_ranks_can_have_is_chosen_and_named(axes, able):
    """Ranks with shards offload nothing, stages of a pipeline stream no blocks: neither is taken, nor advised."""
    planner, setting = Planner(PRO, RELEASED), Setting(ulysses=4, **axes)
    least = {mode: planner.least(CLIP, replace(setting, offload=mode), decode) for mode in OFFLOADS}
    for mode in OFFLOADS:
        if mode in able:
            assert planner.choose(CLIP, setting, decode, least[mode]).setting.offload in able
    with pytest.raises(RequestError) as refused:
        planner.choose(CLIP, setting, decode, min(least[mode] for mode in able) - GIB // 4)
    for mode in set(OFFLOADS) - set(able):
        assert mode not in str(refused.value)


def test_a_budget_is_named_as_it_was_given():
    """Else 1.46 GiB would be "1.5GiB", of which 1.5 GiB are said to be needed."""
    for budget, told in ((1, "1B"), (300 << 20, "300MiB"), (int(1.46 * GIB), "1.46GiB")):
        assert f"memory = '{told}' is" in str(Planner(PRO, RELEASED).refusal(CLIP, Setting(), decode, budget))


def test_what_would_do_does():
    planner = Planner(PRO, RELEASED)
    for offload in OFFLOADS:
        setting = Setting(offload=offload)
        least = planner.least(CLIP, setting, decode)
        assert planner.plan(CLIP, setting, decode, least) is not None
        assert planner.plan(CLIP, setting, decode, least - GIB // 4) is None


def test_sizes_are_told_as_a_person_says_them():
    assert [shown(n) for n in (14 * GIB + GIB // 2, GIB, GIB // 2)] == ["14.5 GiB", "1.0 GiB", "512 MiB"]


def test_the_document_tells_what_the_code_computes():
    """docs/memory.md: least budgets, and the weights they are made of."""
    text = (ROOT / "docs" / "memory.md").read_text()
    rows = {"Pro": (PRO, EXACT), "Pro, fp8": (PRO, FP8), "Lite": (LITE, EXACT)}
    for name, (config, precision) in rows.items():
        modulation = "tables" if precision == FP8 else "resident"
        setting = Setting(precision=precision, modulation=modulation)
        planner = Planner(config, RELEASED)
        least = [planner.least(CLIP, replace(setting, offload=mode), decode) / GIB for mode in OFFLOADS]
        assert f"| {name} | " + " | ".join(f"{n:.1f}" for n in least) + " |" in text
    pro, lite, small = (
        transformer_weights(config, Setting(precision=precision))
        for config, precision in ((PRO, EXACT), (LITE, EXACT), (PRO, FP8))
    )
    told = [f"| {pro.outer / GIB:.2f} | {lite.outer / GIB:.2f} |"]
    told += [f"| 60 x {pro.block / GIB:.3f} (fp8: {small.block / GIB:.3f}) | 32 x {lite.block / GIB:.3f} |"]
    told += [f"| {pro.modulation / GIB:.1f} | {lite.modulation / GIB:.1f} |"]
    host = [Planner(c, RELEASED).plan(CLIP, Setting(offload="block"), decode, None).footprint.host for c in (PRO, LITE)]
    told += [f"{host[0] / GIB:.1f} GiB for Pro", f"{host[1] / GIB:.1f} GiB for Lite"]
    assert [part for part in told if part not in text] == []
