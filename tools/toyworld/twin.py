"""The distilled twin: the teacher with tenfold heads, trained to do in ten forwards what guidance does in forty."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
from diffusers import Kandinsky6Transformer3DModel
from torch import Tensor

from diptych.model.checkpoint import Checkpoint
from diptych.sampling.schedules import PiFlowSchedule
from tools.toyworld.flow import BOUNCING, KINDS, SAVE_SECONDS, SHIFT, optimizers, resume, save
from tools.toyworld.imitation import Imitation, Own, Policy, noised
from tools.toyworld.judging import Parts
from tools.toyworld.pool import features, latents
from tools.toyworld.source import Pool
from tools.toyworld.training import Average, Budget, Log, Step, device, kernels_agree, set_rate

STEPS = 10
HEADS = ("out_layer.out_layer", "audio_out_layer.out_layer")


def build(teacher: Any) -> Kandinsky6Transformer3DModel:
    """The teacher with its heads repeated: every grid point says what the teacher says at the segment's start."""
    config, grid = teacher.config, PiFlowSchedule.n_grid
    model = Kandinsky6Transformer3DModel.from_config(
        config, out_visual_dim=grid * config.out_visual_dim, out_audio_dim=grid * config.out_audio_dim
    )
    state = teacher.state_dict()
    for name in HEADS:
        state[f"{name}.weight"] = state[f"{name}.weight"].repeat(grid, 1)
        state[f"{name}.bias"] = state[f"{name}.bias"].repeat(grid)
    model.load_state_dict(state)
    return model


def train(
    out: Path,
    seconds: float,
    batch: int,
    *,
    teacher: str = "demo",
    clips: int = 32768,
    encode_seconds: float = 30.0,
    state: Path | None = None,
    rate: float = 1e-3,
    finish_after: float | None = None,
    plain: bool = False,
    fused: bool = True,
) -> None:
    """Train for `seconds`; write `twin.safetensors` (averaged weights), `twin_raw.safetensors` and `twin.jsonl`.

    teacher: a checkpoint folder or `demo`; its guidance is what the twin has built in.
    batch: half of it clips of the pool with noise added, half what the twin itself is denoising.
    The rest as for `flow.train`.
    """
    born = time.monotonic()
    seed = 700 if state is None else 700 + int(time.time()) % 1000
    pool = Pool(seed, clips, "cpu", BOUNCING)  # forks, so before any GPU is touched
    place = device()
    pool.to(place)
    log = Log(out / "twin.jsonl")
    checkpoint = Checkpoint.open(teacher)
    parts = Parts.open(checkpoint.root, place)
    parts.transformer.requires_grad_(False)
    model = build(parts.transformer).to(place)
    average = resume(state, model, "twin") if state else Average(model, 0.999)
    words, none = features(checkpoint.root, pool.captions, place)
    torch.manual_seed(seed)
    started = time.monotonic()
    data = latents(parts.vae, parts.audio_vae, pool, place, encode_seconds, lambda *_: parts.factors)
    count = len(data.video)
    log(stage="twin", clips=count, seconds=time.monotonic() - started, ready=time.monotonic() - born)

    policy = Policy(PiFlowSchedule(STEPS, SHIFT), place)
    work = Imitation(model, parts.transformer, data, words, none, policy, checkpoint.defaults.guidance)
    if fused and place.type == "cuda":
        work.fused = kernels_agree(lambda ours: _power(work, ours), model.parameters(), log)
        torch.manual_seed(seed)
    both = optimizers(model)
    memory = torch.cuda.graph_pool_handle() if place.type == "cuda" else None

    def kind_of_step(kind: str) -> Step:
        own = Own(data, policy, kind, batch // 2)

        def loss(values: dict[str, Tensor]) -> dict[str, Tensor]:
            return work.loss(kind, values["index"], own)

        return Step(loss, model.parameters(), both, pool=memory, record=not plain)

    steps = {kind: kind_of_step(kind) for kind in dict.fromkeys(KINDS)}
    if finish_after is not None:
        seconds = min(seconds, born + finish_after - time.monotonic())
    budget, step, saved = Budget(seconds, warmup_steps=200), 0, 0.0
    fresh, order, at = batch - batch // 2, torch.randperm(count, device=place), 0
    report_every = 100 if place.type == "cuda" else 1
    while not budget.over:
        if at + fresh > count:
            order, at = torch.randperm(count, device=place), 0
        kind = KINDS[step % len(KINDS)]
        for optimizer in both:
            set_rate(optimizer, rate * budget.rate(step))
        values = steps[kind]({"index": order[at : at + fresh]})
        average.update(step)
        if step % report_every in (0, 2) and kind in ("text", "image"):
            log(stage="twin", kind=kind, step=step, seconds=budget.spent, **{k: float(v) for k, v in values.items()})
        if budget.spent - saved > SAVE_SECONDS:
            saved = budget.spent
            save(out, model, average, "twin")
        at += fresh
        step += 1
    save(out, model, average, "twin")
    log(stage="twin", step=step, seconds=budget.spent)


def _power(work: Imitation, ours: bool) -> Tensor:
    """Mean square of the student's predictions: a scalar that all of its kernels take part in."""
    work.fused = ours
    start = noised(work.data, work.policy, "image", torch.arange(16, device=work.data.video.device))
    return torch.stack([u.square().mean() for u in work.predictions(start)]).sum()
