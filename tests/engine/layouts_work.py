"""What a rank of the pool does for test_layouts: the engine's own parts, inside the pool's process group."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from diptych.engine.components import Components
from diptych.engine.options import Options
from diptych.engine.order import take_batch
from diptych.engine.runner import Runner
from diptych.engine.sharing import alone, sharing_for
from diptych.engine.stages import Stages
from diptych.engine.team import Team
from diptych.model.checkpoint import Checkpoint
from diptych.model.config import LITE, TransformerConfig
from diptych.model.transformer import Transformer
from diptych.parallel import Layout
from diptych.request import ClipRequest

CPU = torch.device("cpu")


@cache
def components(folder: str) -> Components:
    options = Options(Checkpoint.open(folder), Layout(), CPU, torch.float32, timedelta(seconds=60))
    return Components.load(options, CPU, first=True)


def clips(layout: str | None, folder: str, batches: list[list[ClipRequest]]) -> list[dict[str, Any]] | None:
    """For each batch: the first velocity, and the clips. On ranks after the first only the velocity."""
    parts = components(folder)
    runner = Runner(parts, alone() if layout is None else sharing_for(Layout.parse(layout), CPU))
    results = []
    for batch in batches:
        orders = take_batch(batch, parts.options.checkpoint.defaults)
        job, _ = runner.prepare(orders, Stages())
        with torch.no_grad():
            velocity = runner.denoiser(job).velocity(job.noise, torch.tensor(700.0))
        if layout is None:
            made = runner.generate(orders, Stages())
        else:
            control = dist.group.WORLD
            made = Team(runner, control).generate(orders, Stages(), lambda: False)
        results.append({"velocity": [None if x is None else x.numpy() for x in velocity], "clips": made})
    return results


def traced(layout: str, folder: str, request: ClipRequest, out: str) -> dict[str, Any] | None:
    """A traced clip: its report on the first rank, and this rank's attention and merge bytes by the formulas."""
    from diptych.attention.volume import attention_bytes, merge_bytes
    from diptych.parallel import TokenShard

    parts = components(folder)
    parts = replace(parts, options=replace(parts.options, trace=Path(out)))
    parsed = Layout.parse(layout)
    runner = Runner(parts, sharing_for(parsed, CPU), dist.get_rank())
    orders = take_batch([request], parts.options.checkpoint.defaults)
    made = Team(runner, dist.group.WORLD).generate(orders, Stages(), lambda: False)
    r, c = orders[0].resolved, parts.transformer.config
    plan = TokenShard(r.T * (r.Y // 2) * (r.X // 2), parsed.mesh("cpu")).plan
    sizes = {"head_dim": c.head_dim, "itemsize": 4}
    expected = attention_bytes(plan, heads=c.heads, kv_heads=c.heads, **sizes)
    expected += merge_bytes(parsed.sequence, queries=r.A, heads=c.heads_a, **sizes)
    return {"report": None if made is None else made[0].report, "expected": expected}


def lite_heads() -> TransformerConfig:
    """Lite's 28 and 14 heads on small heads."""
    heads, heads_a, size = LITE.heads, LITE.heads_a, 8
    axes = (2, 2, 4)
    return replace(
        LITE,
        model_dim=heads * size,
        model_dim_a=heads_a * size,
        axes_dims=axes,
        axes_dims_a=axes,
        ff_dim=64,
        ff_dim_a=64,
        time_dim=16,
        time_dim_a=16,
        in_text_dim=16,
        in_text_dim2=16,
        num_text_blocks=1,
        num_visual_blocks=2,
    )


def lite_velocity(layout: str | None) -> list[np.ndarray]:
    """One velocity of a small transformer with Lite's numbers of heads, video tokens that nothing divides."""
    torch.manual_seed(0)
    config = lite_heads()
    model = Transformer(config).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        scale = 0.3 if "modulation" in name else parameter.shape[-1] ** -0.5
        parameter.data = torch.randn(parameter.shape) * scale + (1.0 if "norm" in name else 0.0)
    video, audio = torch.randn(1, 3, 6, 10, config.visual_in), torch.randn(1, 7, config.in_audio_dim)
    text, pooled = torch.randn(1, 5, config.in_text_dim), torch.randn(1, config.in_text_dim2)
    grid = model.grid(3, 6, 10, 7, tail=False, device=CPU)
    context, times = model.context(text, pooled, None), torch.tensor([500.0])
    sharing = alone() if layout is None else sharing_for(Layout.parse(layout), CPU)
    attend, shard = sharing.split(grid.tokens)
    from diptych.sampling.denoiser import Denoiser

    denoiser = Denoiser(model, attend, grid, [context], 1.0, None, shard)
    out = denoiser.lane(video, audio, times, context)
    return [out.video.numpy(), out.audio.numpy()]
