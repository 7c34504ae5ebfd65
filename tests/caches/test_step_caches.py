"""What a predicted forward runs and what it leaves out, what reports tell, and that nothing outlives its request."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
import torch
from caches_work import CACHES, SIZE, components

from diptych.engine.engine import Engine
from diptych.engine.order import take_batch
from diptych.engine.runner import Runner
from diptych.engine.stages import Stages
from diptych.errors import Cancelled
from diptych.request import ClipRequest
from diptych.sampling.caches import CachePlan
from diptych.sampling.caches.base import Residual, Run
from diptych.sampling.caches.navicache import Kalman
from diptych.sampling.caches.taylor import Taylor, TaylorSettings

REQUEST = ClipRequest("a red circle", **SIZE)


@pytest.fixture(scope="module")
def exact(engine):
    return engine.generate(REQUEST)


def same(a, b) -> bool:
    return np.array_equal(a.frames, b.frames) and np.array_equal(a.audio, b.audio)


@contextmanager
def counted(model):
    """How often each part of a transformer runs."""
    parts = {
        "first block": model.fused_blocks[0],
        "last block": model.fused_blocks[-1],
        "tower": model.text_towers[0][0],
        "audio tower": model.text_towers[1][-1],
        "tokens": model.visual_embeddings,
        "head": model.out_layer,
        "time": model.audio_time_embeddings,
    }
    counts = dict.fromkeys(parts, 0)

    def counter(name):
        def count(module, inputs, output):
            counts[name] += 1

        return count

    hooks = [part.register_forward_hook(counter(name)) for name, part in parts.items()]
    yield counts
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize("name", CACHES)
def test_a_predicted_forward_runs_only_what_it_needs(name, tiny_base, engine):
    parts = components(str(tiny_base))
    plan = CachePlan.of(CACHES[name], engine.checkpoint)
    runner = Runner(parts)
    job, _ = runner.prepare(take_batch([REQUEST], engine.defaults, plan), Stages())
    with counted(parts.transformer) as counts:
        result = runner.denoise(job, Stages())
    computed = sum(lane["computed"] for lane in result.cached["lanes"])
    total = 2 * SIZE["steps"]
    assert 0 < computed < total
    assert counts["last block"] == computed
    runs = {"first block": computed, "tower": computed, "audio tower": computed, "head": total, "time": total}
    if name in ("firstblock", "cachedit"):
        runs |= {"first block": total, "tower": total, "audio tower": total}
    if name == "navicache":
        runs |= {"head": computed, "time": computed}
    if name == "teacache":
        runs["time"] += SIZE["steps"]
    assert {part: counts[part] for part in runs} == runs
    tokens = {"navicache": computed, "teacache": total + SIZE["steps"]}
    assert counts["tokens"] == tokens.get(name, total), "TeaCache looks at the conditional tokens of every step"


@pytest.mark.parametrize(
    "text",
    [
        "firstblock:0",
        "cachedit:0",
        "cachedit:,0,front=2,order=1",
        "navicache:0,align=1",
        "taylor:1,0",
        "magcache:0",
        "teacache:0",
        "record",
    ],
)
def test_a_cache_that_predicts_nothing_is_exact_to_the_bit(text, engine, exact):
    clip = engine.generate(REQUEST, cache=text)
    assert clip.report["forwards"]["computed"] == 2 * SIZE["steps"]
    assert same(clip, exact)


@pytest.mark.parametrize("name", CACHES)
def test_the_report_names_the_cache_and_counts_by_lane(name, engine, exact):
    clip = engine.generate(REQUEST, cache=CACHES[name])
    forwards = clip.report["forwards"]
    assert forwards["total"] == exact.report["forwards"]["total"] == 2 * SIZE["steps"]
    assert [lane["total"] for lane in forwards["lanes"]] == [SIZE["steps"]] * 2
    assert sum(lane["computed"] for lane in forwards["lanes"]) == forwards["computed"] < forwards["total"]
    assert clip.report["cache"]["name"].startswith(f"{name}:")
    assert ("calibration" in clip.report["cache"]) == (name in ("magcache", "teacache"))
    assert "cache" not in exact.report
    assert not same(clip, exact), "it predicted nothing"
    stray = np.abs(clip.latents["video"] - exact.latents["video"]).mean() / np.abs(exact.latents["video"]).mean()
    assert stray < 0.2, "a prediction is near the truth"


@pytest.mark.parametrize("name", CACHES)
def test_nothing_of_a_cached_request_outlives_it(name, engine, exact):
    first = engine.generate(REQUEST, cache=CACHES[name])

    def stop(progress):
        if progress.stage == "denoise" and progress.done == 7:
            raise Cancelled("enough")

    with pytest.raises(Cancelled):
        engine.generate(ClipRequest("waves", **(SIZE | {"frames": 9, "steps": 11})), stop, cache=CACHES[name])
    assert same(engine.generate(REQUEST, cache=CACHES[name]), first)
    assert same(engine.generate(REQUEST), exact)


def test_an_engine_has_a_cache_and_a_request_may_have_another(tiny_base, engine, exact):
    with Engine.load(tiny_base, device="cpu", modulation="tables", cache="taylor:1,2") as cached:
        clip = cached.generate(REQUEST)
        assert clip.report["cache"]["name"].startswith("taylor:order=1")
        assert same(cached.generate(REQUEST, cache="none"), exact)
        for name in ("teacache", "magcache"):
            have, want = cached.generate(REQUEST, cache=CACHES[name]), engine.generate(REQUEST, cache=CACHES[name])
            assert same(have, want), "modulation tables change nothing"


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_taylor_keeps_what_is_counted(order):
    settings = TaylorSettings(order=order)
    cache = settings.start(Run(1, 20))
    for step in range(8):
        cache.keep(0, step, Residual(torch.ones(1, 4, 2), None))
    assert len(cache._differences[0]) == CachePlan(settings, (), "tiny").kept


def test_memory_is_planned_with_all_that_a_cache_keeps(engine):
    """Of a series of four tensors for each of two lanes, two more a lane than of a series of two."""
    clips = [engine.generate(REQUEST, cache=f"taylor:{order}") for order in (1, 3)]
    two, four = (clip.report["memory"]["predicted"]["denoise"] for clip in clips)
    _, T, Y, X = clips[0].latents["video"].shape
    assert four - two == 2 * 2 * T * (Y // 2) * (X // 2) * engine.checkpoint.transformer.model_dim * 4


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_taylor_continues_a_line_exactly_and_a_curve_by_its_differences(order):
    cache = Taylor(TaylorSettings(order=order), Run(1, 20))
    for step in (0, 3, 6, 9):
        cache.keep(0, step, Residual(torch.tensor([2.0 * step + 1, 5.0]), None))
    ahead = cache.ahead(0, 11).video.tolist()
    assert ahead == ([23.0, 5.0] if order else [19.0, 5.0])
    for step in (0, 3, 6, 9):
        cache.keep(0, step, Residual(torch.tensor([float(step**2)]), None))
    slope, bend = (81 - 36) / 3, ((81 - 36) / 3 - (36 - 9) / 3) / 3
    want = 81 + (2 * slope if order else 0) + (2**2 / 2 * bend if order > 1 else 0)
    assert cache.ahead(0, 11).video.item() == pytest.approx(want)


def test_the_kalman_estimate_follows_its_formula():
    estimate = Kalman()
    assert estimate.state is None
    estimate.measure(2.0)
    assert estimate.state == 2.0
    estimate.measure(3.0)
    gain = 1.05 / (1.05 + 0.05 + 1e-8)
    assert estimate.state == pytest.approx(2 + gain)
    variance = 1.05 * (1 - gain) + 0.05
    before, gain = estimate.state, variance / (variance + 0.05 + 1e-8)
    estimate.measure(1.0)
    assert estimate.state == pytest.approx(before + gain * (1 - before))
