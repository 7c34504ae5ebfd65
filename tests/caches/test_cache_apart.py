"""benchmarks/cache_apart.py: in a batch, every clip is predicted as it would be on its own."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from caches_work import CACHES, SIZE, components

from diptych.engine.order import take_batch
from diptych.engine.runner import Runner
from diptych.engine.stages import Stages
from diptych.request import ClipRequest
from diptych.sampling.caches import CachePlan

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from cache_apart import ApartPlan, replay

PROMPTS = ("a red circle", "waves", "x")


@pytest.fixture(scope="module")
def runner(tiny_base):
    return Runner(components(str(tiny_base)))


def job_of(runner, defaults, prompts):
    requests = [ClipRequest(prompt, **(SIZE | {"seed": PROMPTS.index(prompt)})) for prompt in prompts]
    return runner.prepare(take_batch(requests, defaults), Stages())[0]


@pytest.mark.parametrize("name", ["navicache", "firstblock", "teacache"])
def test_each_clip_decides_as_it_does_alone(name, engine, runner):
    plan = CachePlan.of(CACHES[name], engine.checkpoint)
    apart = ApartPlan(plan.settings, plan.calibrations, plan.name, len(PROMPTS))
    together = runner.denoise(replace(job_of(runner, engine.defaults, PROMPTS), cache=apart), Stages())
    computed = []
    for row, prompt in enumerate(PROMPTS):
        alone = runner.denoise(replace(job_of(runner, engine.defaults, [prompt]), cache=plan), Stages())
        assert together.cached["clips"][row]["lanes"] == alone.cached["lanes"]
        for ours, theirs in zip(together.latents, alone.latents, strict=True):
            torch.testing.assert_close(ours[row], theirs[0], rtol=0, atol=2e-5)
        computed.append(alone.cached["lanes"][0]["computed"])
    assert len(set(computed)) > 1 or name == "teacache", "they decide alike, which shows nothing"


def test_replayed_on_exact_clips_a_cache_that_predicts_nothing_computes_all(engine, runner):
    plan = CachePlan.of("record", engine.checkpoint)
    apart = ApartPlan(plan.settings, (), plan.name, 2, keep=True)
    runner.denoise(replace(job_of(runner, engine.defaults, PROMPTS[:2]), cache=apart), Stages())
    run = apart.started[-1].caches[0].run
    shares = [
        replay(CachePlan.of(f"firstblock:{t}", engine.checkpoint).settings, run, apart.started[-1].kept) for t in (0, 9)
    ]
    assert shares[0] == 1
    first, rest = SIZE["steps"] // 5, SIZE["steps"] - SIZE["steps"] // 5 - 1
    assert shares[1] == pytest.approx((first + 1 + rest // 4) / SIZE["steps"])
