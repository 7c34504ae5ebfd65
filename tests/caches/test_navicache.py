"""NaviCache against its formula, followed from what went in and came out."""

from __future__ import annotations

import numpy as np
import torch
from caches_work import SIZE, components

from diptych.engine.order import take_batch
from diptych.engine.runner import Runner
from diptych.engine.stages import Stages
from diptych.request import ClipRequest
from diptych.sampling.caches.base import Run
from diptych.sampling.caches.navicache import NaviCache, NaviCacheSettings
from diptych.sampling.denoise import denoise
from diptych.sampling.schedules import schedule_for

STEPS = 16
SETTINGS = NaviCacheSettings(threshold=0.9, align=3)


def flat(latents) -> np.ndarray:
    return torch.cat([part.reshape(-1) for part in latents]).double().numpy()


class Watched(NaviCache):
    """Remembers what went in and came out, and whether it was computed, lane by lane."""

    def __init__(self) -> None:
        super().__init__(SETTINGS, Run(2, STEPS))
        self.seen: tuple[list, list] = ([], [])

    def velocity(self, forward):
        out = super().velocity(forward)
        self.seen[forward.lane].append((flat(forward.latents), flat(out), self.steps.computed[forward.step]))
        return out


def test_decisions_and_predictions_follow_the_formula(engine, tiny_base):
    runner = Runner(components(str(tiny_base)))
    request = ClipRequest("a red circle", **(SIZE | {"steps": STEPS}))
    job, _ = runner.prepare(take_batch([request], engine.defaults), Stages())
    denoiser = runner.denoiser(job)
    denoiser.cache = cache = Watched()
    denoise(denoiser.velocity, schedule_for(runner.components.scheduler_config, STEPS, "diffusers"), job.noise)

    state, variance, total, last = None, 1.0, 0.0, None
    x_before, decisions = None, []
    for step, (x, out, computed) in enumerate(cache.seen[0]):
        want = step < SETTINGS.align or step == STEPS - 1
        if not want:
            total += state * np.abs(x - x_before).mean() / (np.abs(last[1]).mean() + 1e-8)
            want = total >= SETTINGS.threshold
        assert computed == want, step
        if want:
            if last is not None:
                z = np.abs(out - last[1]).mean() / (np.abs(x - last[0]).mean() + 1e-8)
                if state is None:
                    state = z
                else:
                    variance += 0.05
                    gain = variance / (variance + 0.05 + 1e-8)
                    state, variance = state + gain * (z - state), variance * (1 - gain)
            last, total = (x, out), 0.0
        x_before = x
        decisions.append(want)
    assert "FF" in "".join("T" if want else "F" for want in decisions), "changes must add up over a run"
    assert sum(decisions) > SETTINGS.align + 1

    for lane in cache.seen:
        assert [computed for _, _, computed in lane] == decisions
        offset = None
        for x, out, computed in lane:
            if computed:
                offset = out - x
            else:
                np.testing.assert_allclose(out, x + offset, atol=1e-5)
