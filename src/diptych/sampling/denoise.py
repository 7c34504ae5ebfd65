"""The sampler: one plain loop."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from diptych.sampling.latents import Latents
from diptych.sampling.schedules import Schedule

OnStep = Callable[[int, Callable[[], Latents]], None]
"""Called after step `index` with a function that gives the present estimate of the finished latents."""


@torch.no_grad()
def denoise(
    velocity: Callable[[Latents, Tensor], Latents], schedule: Schedule, latents: Latents, on_step: OnStep | None = None
) -> Latents:
    """From noise to latents, float32 throughout. What `on_step` raises ends the loop."""
    for index, timestep in enumerate(schedule.timesteps):
        v = velocity(latents, timestep)
        before = latents
        latents = _both(schedule.step, index, latents, v)
        if on_step is not None:
            on_step(index, lambda i=index, x=before, v=v: _both(schedule.clean, i, x, v))  # type: ignore[misc]
    return latents


def _both(move: Callable[[int, Tensor, Tensor], Tensor], index: int, x: Latents, v: Latents) -> Latents:
    if x.audio is None:
        return Latents(move(index, x.video, v.video), None)
    assert v.audio is not None
    return Latents(move(index, x.video, v.video), move(index, x.audio, v.audio))
