"""Where a training step spends its time: milliseconds a step, recorded and as it comes, and the kernels behind."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from tools.toyworld import flow, video_vae
from tools.toyworld.pool import Features, Latents
from tools.toyworld.render import to_device
from tools.toyworld.source import draw
from tools.toyworld.text import MAX_TOKENS, POOLED, WIDTH
from tools.toyworld.tracks import collate
from tools.toyworld.training import Loss, Step, adam, device

_STEPS = 20


def profile(stage: str, batch: int) -> None:
    """Print the table for `video` or `flow` at a batch size."""
    place = device()
    loss, parameters, optimizers, values = _video(batch, place) if stage == "video" else _flow(batch, place)
    step = Step(loss, parameters, optimizers)
    _timed("as it comes", lambda: step._run(values), place)
    for _ in range(4):
        step(values)
    _timed("recorded", lambda: step(values), place)
    activities = [torch.profiler.ProfilerActivity.CPU]
    if place.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as found:
        for _ in range(3):
            step._run(values)
        if place.type == "cuda":
            torch.cuda.synchronize()
    order = "self_cuda_time_total" if place.type == "cuda" else "self_cpu_time_total"
    print(found.key_averages().table(sort_by=order, row_limit=30, max_name_column_width=70))


def _timed(name: str, call: Callable[[], object], place: torch.device) -> None:
    steps = _STEPS if place.type == "cuda" else 1
    if place.type == "cuda":
        for _ in range(3):
            call()
        torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(steps):
        call()
    if place.type == "cuda":
        torch.cuda.synchronize()
    print(f"{name}: {1000 * (time.perf_counter() - started) / steps:.1f} ms a step", flush=True)


_Stage = tuple[Loss, list[Tensor], list[torch.optim.Optimizer], dict[str, Tensor]]


def _video(batch: int, place: torch.device) -> _Stage:
    vae = video_vae.build().to(place)
    piece = video_vae.piece(to_device(collate(draw(1, 0, batch).tracks), place), 0, 29)
    live = list(vae.parameters())
    return lambda values: video_vae.windows_loss(vae, **values), live, [adam(live)], piece


def _flow(batch: int, place: torch.device) -> _Stage:
    def noise(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, device=place).bfloat16()

    model = flow.build().to(place)
    data = Latents(noise(13, 8, 12, 16), noise(8, 12, 16), noise(8, 12, 16), noise(88, 40), 1.0, 1.0)
    mask = torch.ones(batch, MAX_TOKENS, dtype=torch.bool, device=place)
    words = Features(noise(MAX_TOKENS, WIDTH), mask, noise(POOLED))
    index = torch.arange(batch, device=place)
    none = words.rows(index[:1])
    live = list(model.parameters())
    return (
        lambda values: flow.flow_loss(model, data, words, none, "text", values["index"], fused=place.type == "cuda"),
        live,
        flow.optimizers(model),
        {"index": index},
    )
