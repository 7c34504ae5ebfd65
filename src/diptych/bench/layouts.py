"""What one rank of many would have to do, done on one device: its shard, its heads, its packing; nothing travels.

The code that runs is the code of a real run, in torch's fake process group. What an exchange would bring is a copy of
what this rank sends: shapes, kernels, copies and operator order are those of a rank, numbers are not. They have to be
numbers of the right kind, though: with tensors that nobody had written, an H200 did equal work up to 1.2 times faster.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diptych.attention.collectives import Traffic
from diptych.bench.forward import machine
from diptych.bench.geometry import Geometry, Inputs, config_named, random_inputs, random_transformer
from diptych.bench.timing import median
from diptych.engine.sharing import sharing_for
from diptych.errors import LayoutError
from diptych.model.transformer import Transformer
from diptych.parallel import Layout, TokenShard
from diptych.parallel.fit import check_fit
from diptych.sampling.denoiser import Denoiser

GUIDED_LANES = 2


def layouts_of(world: int, *, guided: bool) -> list[Layout]:
    """Every layout of `world` ranks over ring, ulysses and, where there is guidance, cfg; Ulysses-heavy first."""
    found = []
    for cfg in (1, 2) if guided else (1,):
        if world % cfg:
            continue
        per_lane = world // cfg
        rings = [ring for ring in range(1, per_lane + 1) if per_lane % ring == 0]
        found += [Layout(cfg=cfg, ring=ring, ulysses=per_lane // ring) for ring in rings]
    return found


def bench_layouts(
    model_name: str,
    geometry: Geometry,
    worlds: list[int],
    *,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    blocks: int | None = None,
    text_tokens: int = 200,
    repeats: int = 3,
    link: float = 370e9,
    simulate: bool = True,
    only: list[Layout] | None = None,
) -> dict[str, Any]:
    """Seconds, bytes and predicted step of one rank for every layout of each number of ranks.

    link: bytes a second that one rank sends to others, for the prediction; transfers are taken as not hidden at all.
    simulate: this process plays rank 0, which never holds fewer tokens or heads than another. Otherwise it is a rank
    that torchrun started, and seconds are those of a real forward.

    Raises `LayoutError` where real ranks are asked for and torchrun did not start that many.
    """
    config = config_named(model_name, blocks)
    guided = config.grid == 1
    layouts = [
        layout
        for world in worlds
        for layout in (layouts_of(world, guided=guided) if only is None else only)
        if layout.world == world and layout.ulysses <= config.heads
    ]
    for layout in layouts:
        check_fit(layout, config)
    model = random_transformer(config, device, dtype)
    inputs = random_inputs(config, geometry, text_tokens, device, dtype)
    rows = [
        measure_layout(layout, model, inputs, geometry, device=device, repeats=repeats, link=link, simulate=simulate)
        for layout in layouts
    ]
    alone = next((row for row in rows if row["ranks"] == 1), None)
    for row in rows:
        if alone is not None:  # a step is both lanes; cfg=2 halves it by running one lane only
            row["compute_speedup"] = alone["compute_step"] / row["compute_step"]
            row["step_speedup"] = alone["predicted_step"] / row["predicted_step"]
            row["efficiency"] = row["compute_speedup"] / row["ranks"]
    return {
        "model": model_name,
        "blocks": config.num_visual_blocks,
        "geometry": str(geometry),
        "tokens": geometry.tokens,
        "dtype": str(dtype).removeprefix("torch."),
        "simulated": simulate,
        "link_bytes_per_second": link,
        "machine": machine(device),
        "layouts": rows,
    }


def measure_layout(
    layout: Layout,
    model: Transformer,
    inputs: Inputs,
    geometry: Geometry,
    *,
    device: torch.device,
    repeats: int = 1,
    link: float = 370e9,
    simulate: bool = True,
) -> dict[str, Any]:
    """One rank's forward under `layout`; as `bench_layouts`, which does this for many. Warmed up once."""
    with process_group(layout, device, simulate=simulate):
        return _measure(layout, model, inputs, geometry, device, repeats, link)


def _measure(
    layout: Layout,
    model: Transformer,
    inputs: Inputs,
    geometry: Geometry,
    device: torch.device,
    repeats: int,
    link: float,
) -> dict[str, Any]:
    guided = model.config.grid == 1
    grid = model.grid(*geometry.latents, geometry.audio_tokens, tail=False, device=device)
    sharing = sharing_for(layout, device)
    attend, shard = sharing.split(grid.tokens)
    timestep = inputs.timestep.cpu()[0]
    with torch.no_grad():
        context = model.context(inputs.text, inputs.pooled, None)
        denoiser = Denoiser(model, attend, grid, [context], 1.0, None, shard)

        def forward() -> None:
            denoiser.lane(inputs.video, inputs.audio, timestep, context)

        with Traffic() as traffic:
            forward()
        seconds = median(forward, device, repeats, warmup=0)  # counting bytes was the warm-up
    lanes = GUIDED_LANES // layout.cfg if guided else 1
    sent = traffic.bytes * lanes
    if layout.cfg == 2:  # each half sends its velocity to the other, once a step
        sent += sum(2 * x.numel() for x in (inputs.video[..., : model.config.in_visual_dim], inputs.audio))
    return {
        "layout": str(layout),
        "ranks": layout.world,
        "tokens": shard.span.size if isinstance(shard, TokenShard) else grid.tokens,
        "forward": seconds,
        "compute_step": seconds * lanes,
        "bytes_per_forward": traffic.bytes,
        "bytes_per_step": sent,
        "predicted_step": seconds * lanes + sent / link,
    }


@contextmanager
def process_group(layout: Layout, device: torch.device, *, simulate: bool) -> Iterator[None]:
    """The default process group of a layout's ranks, ended afterwards: torchrun's, or one in which this process plays
    the first rank. Raises `LayoutError` where torchrun started another number."""
    exchanges: AbstractContextManager[None] = nullcontext()
    if simulate:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.world)
        exchanges = _played(device)
    else:
        started = int(os.environ.get("WORLD_SIZE", "0"))
        if started != layout.world:
            raise LayoutError(
                f"layout {layout} needs {layout.world} ranks and torchrun started {started}; "
                f"start with torchrun --nproc-per-node {layout.world}, or add --simulate."
            )
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        with exchanges:
            yield
    finally:
        dist.destroy_process_group()


@contextmanager
def _played(device: torch.device) -> Iterator[None]:
    """Collectives that give what this rank sends, as often as it takes to fill what it would receive."""

    def all_to_all(x_N: Tensor, receive: list[int], send: list[int], group: str) -> Tensor:
        return _repeated(x_N, sum(receive))

    def all_gather(x: Tensor, size: int, group: str) -> Tensor:
        return torch.cat([x] * size)

    def all_reduce(x: Tensor, operation: str, group: str) -> Tensor:
        return x.clone()

    with torch.library._scoped_library("_c10d_functional", "IMPL") as operators:
        for name, played in (
            ("all_to_all_single", all_to_all),
            ("all_gather_into_tensor", all_gather),
            ("all_reduce", all_reduce),
        ):
            operators.impl(name, played, "CUDA" if device.type == "cuda" else "CPU")
        yield


def _repeated(x_N: Tensor, length: int) -> Tensor:
    out = x_N.new_empty(length)
    for start in range(0, length, max(len(x_N), 1)):
        part = out[start : start + len(x_N)]
        part.copy_(x_N[: len(part)])
    return out


def layouts_table(result: dict[str, Any]) -> str:
    """The lines of one `bench attention`."""
    kind = "one rank of N, simulated: nothing travels" if result["simulated"] else "real ranks"
    lines = [
        f"{result['model']}, {result['blocks']} blocks, {result['geometry']}, {result['dtype']}, "
        f"{result['machine']['device']}, torch {result['machine']['torch']}; {kind}",
        f"prediction for {result['link_bytes_per_second'] / 1e9:g} GB/s a rank, no transfer hidden",
        "",
        f"{'layout':22}{'tokens':>8}{'forward s':>11}{'GB sent':>9}"
        f"{'compute x':>11}{'of ideal':>9}{'step s':>9}{'step x':>8}",
    ]
    for row in result["layouts"]:
        gained = f"{row['compute_speedup']:11.2f}{row['efficiency']:9.1%}" if "compute_speedup" in row else " " * 20
        step = f"{row['step_speedup']:8.2f}" if "step_speedup" in row else ""
        lines.append(
            f"{row['layout']:22}{row['tokens']:8}{row['forward']:11.4f}{row['bytes_per_step'] / 1e9:9.2f}"
            f"{gained}{row['predicted_step']:9.3f}{step}"
        )
    return "\n".join(lines)
