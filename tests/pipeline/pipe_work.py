"""PipeFusion on ranks, and the same staleness in one process, written down plainly."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from diptych.attention import LocalAttend, Role
from diptych.attention.plan import spans, split
from diptych.engine.sharing import sharing_for
from diptych.model.config import TINY
from diptych.model.ops import Rope
from diptych.model.tiny_weights import RULES, fill
from diptych.model.transformer import Transformer
from diptych.parallel import Layout
from diptych.parallel.stages import stage_blocks
from diptych.sampling.denoiser import Denoiser
from diptych.sampling.latents import Latents
from diptych.sampling.pipefusion import PipeSettings

CPU = torch.device("cpu")
BLOCKS = 5
"""More than four stages, and nothing that two or four divide."""
MODEL = replace(TINY, num_visual_blocks=BLOCKS, num_text_blocks=1)
TIMES = (900.0, 700.0, 400.0, 150.0)


@dataclass(frozen=True)
class Case:
    """T x Y x X latents, A of sound; with guidance two lanes; from an image a frame more."""

    grid: tuple[int, int, int] = (3, 6, 10)
    audio: int = 7
    batch: int = 1
    guided: bool = False
    image: bool = False
    warmup: int = 1
    patches: int = 3


def build() -> Transformer:
    model = Transformer(MODEL).eval().requires_grad_(False)
    fill(model, RULES["transformer"], seed=0)
    return model


def latents(case: Case, step: int) -> Latents:
    """Other latents in every step, so that what is stale differs from what is fresh."""
    draw = torch.Generator().manual_seed(10 + step)
    T, Y, X = case.grid
    video = torch.randn(case.batch, T, Y, X, TINY.in_visual_dim, generator=draw)
    return Latents(
        video, torch.randn(case.batch, case.audio, TINY.in_audio_dim, generator=draw) if case.audio else None
    )


def denoiser(model: Transformer, case: Case, attend: Any, shard: Any) -> Denoiser:
    draw = torch.Generator().manual_seed(1)
    lanes = 1 + case.guided
    contexts = [
        model.context(
            torch.randn(case.batch, 5 + lane, TINY.in_text_dim, generator=draw),
            torch.randn(case.batch, TINY.in_text_dim2, generator=draw),
            None,
        )
        for lane in range(lanes)
    ]
    T, Y, X = case.grid
    first = torch.randn(case.batch, Y, X, TINY.in_visual_dim, generator=draw) if case.image else None
    grid = model.grid(T, Y, X, case.audio, tail=case.image, device=CPU)
    return Denoiser(model, attend, grid, contexts, 3.0 if case.guided else 1.0, first, shard)


def tokens(case: Case) -> int:
    T, Y, X = case.grid
    return (T + case.image) * (Y // 2) * (X // 2)


@torch.no_grad()
def plain(case: Case) -> list[Latents]:
    """Every step's velocity by one rank that keeps nothing."""
    model = build()
    one = denoiser(model, case, LocalAttend(), None)
    return [one.velocity(latents(case, step), torch.tensor(time)) for step, time in enumerate(TIMES)]


@torch.no_grad()
def piped(layout_text: str, case: Case) -> dict[str, Any]:
    """The same by the stages of a layout; on each rank all velocities, and what it holds."""
    layout = Layout.parse(layout_text)
    model = build()
    own = stage_blocks(BLOCKS, layout.pipeline, layout.stage(dist.get_rank()))
    model.hold(own)
    sharing = sharing_for(layout, CPU, pipe=PipeSettings(case.warmup, case.patches))
    attend, shard = sharing.split(tokens(case))
    one = denoiser(model, case, attend, shard)
    one.pipe, one.combine = sharing.pipe(shard), sharing.combine
    velocities = [one.velocity(latents(case, step), torch.tensor(time)) for step, time in enumerate(TIMES)]
    names = [name.split(".") for name, _ in model.named_parameters()]
    held = {int(name[1]) for name in names if name[0] == "visual_transformer_blocks"}
    caches = [cache for of_block in one.pipe.caches.values() for cache in (of_block.within, of_block.from_video)]
    kept = sum(x.nbytes for cache in caches for x in (cache.k_BCHK, cache.v_BCHK) if x is not None)
    return {"velocities": velocities, "held": held, "own": set(own), "kept": kept}


@dataclass
class Stale:
    """An attention that remembers every key of every block, and gets those of some rows anew."""

    rows: slice = field(default_factory=lambda: slice(None))
    keys: dict[Any, tuple[Tensor, Tensor]] = field(default_factory=dict)
    place: Any = None

    def __call__(
        self, role: Role, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, bound: float | None = None
    ) -> Tensor:
        if role in (Role.VISUAL_SELF, Role.AUDIO_FROM_VIDEO):
            whole = self.keys.setdefault((self.place, role), (k.clone(), v.clone()))
            for kept, fresh in zip(whole, (k, v), strict=True):
                kept[:, self.rows] = fresh
            k, v = whole
        return LocalAttend()(role, q, k, v, mask, bound=bound)


@torch.no_grad()
def simulated(case: Case) -> list[Latents]:
    """The staleness of PipeFusion in one process: patch after patch through all blocks."""
    model, stale = build(), Stale()
    one = denoiser(model, case, stale, None)
    results = []
    for step, time in enumerate(TIMES):
        lanes = []
        for lane, context in enumerate(one.contexts):
            now = latents(case, step)
            forward = one.forward(one._input(now.video), now, torch.tensor(time), context, lane, step)
            streams = forward.embed()
            count = 1 if step < case.warmup else case.patches
            video, audio = [], None
            for span in spans(split(tokens(case), count)):
                rows = stale.rows = slice(span.start, span.stop)
                rope = Rope(streams.rope_video.cos_SP[rows], streams.rope_video.sin_SP[rows])
                piece = replace(streams, video=streams.video[:, rows], rope_video=rope)
                for block in range(BLOCKS):
                    stale.place = (lane, block)
                    piece = model.blocks(piece, stale, block, block + 1)
                part, audio = model.head(piece)
                video.append(part)
            lanes.append(forward.whole(torch.cat(video, 1), audio))
        results.append(one.combine([lambda v=v: v for v in lanes], one.guidance))
    return results
