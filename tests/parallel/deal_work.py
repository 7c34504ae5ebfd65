"""What the ranks do in the tests of dealt pieces: pictures in, frames out, and pieces that count themselves."""

from __future__ import annotations

import weakref
from datetime import timedelta
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from diptych.codecs import video
from diptych.codecs.tiles import plan_tiles
from diptych.engine import runner as engine_runner
from diptych.engine.components import Components
from diptych.engine.options import Options
from diptych.engine.order import take_batch
from diptych.engine.runner import Runner
from diptych.engine.sharing import alone, sharing_for
from diptych.engine.stages import Stages
from diptych.errors import ClipError
from diptych.model.checkpoint import Checkpoint
from diptych.parallel import Layout
from diptych.parallel.deal import Deal
from diptych.request import ClipRequest

CPU = torch.device("cpu")


@cache
def components(folder: str) -> Components:
    options = Options(Checkpoint.open(folder), Layout(), CPU, torch.float32, timedelta(seconds=60))
    return Components.load(options, CPU, first=True)


def decode(
    folder: str, world: int, shape: tuple[int, int, int, int], budget: int | None, spoilt: float = 0.0
) -> tuple[np.ndarray | str | None, int]:
    """Frames on the first rank, or what it refused, and how many tiles this rank decoded. shape: B, T, Y, X."""
    B, T, Y, X = shape
    vae, deal = components(folder).vae, Deal.to_all_ranks() if world > 1 else Deal()
    latents = torch.randn((B, 16, T, Y, X), generator=torch.Generator().manual_seed(T))
    latents[0, 0, 0, 0, 0] += spoilt
    plan = plan_tiles(T, Y, X, budget, video.decode_cost(vae))
    decoded: list[Any] = []
    original = video.decode_tile

    def counted(*args: Any) -> torch.Tensor:
        decoded.append(args[-1])
        return original(*args)

    video.decode_tile = counted
    try:
        if not deal.first:
            video.lend_decoder(vae, latents, plan, deal)
            return None, len(decoded)
        return video.decode_video(vae, latents, plan, deal=deal), len(decoded)
    except ClipError as error:
        return str(error), len(decoded)
    finally:
        video.decode_tile = original


def encode(folder: str, world: int, requests: list[ClipRequest]) -> tuple[np.ndarray | None, int]:
    """First frames on the first rank, and how many pictures this rank encoded."""
    parts, encoded = components(folder), []
    runner = Runner(parts, sharing_for(Layout(ulysses=world), CPU) if world > 1 else alone())
    orders = take_batch(requests, parts.options.checkpoint.defaults)
    original = engine_runner.image_moments

    def counted(*args: Any) -> torch.Tensor:
        encoded.append(args[-1])
        return original(*args)

    engine_runner.image_moments = counted
    try:
        if world > 1 and dist.get_rank():
            runner.lend_encoder(orders)
            return None, len(encoded)
        job, _ = runner.prepare(orders, Stages())
        assert job.first_frame is not None
        return job.first_frame.numpy(), len(encoded)
    finally:
        engine_runner.image_moments = original


class Counted:
    """Makes pieces of different sizes, and knows how many of its results are alive."""

    def __init__(self) -> None:
        self.alive = self.most = self.made = 0

    def __call__(self, piece: int) -> torch.Tensor:
        self.made += 1
        return self._born(torch.full((1000 + piece,), float(piece)))

    def empty(self, piece: int) -> torch.Tensor:
        return self._born(torch.empty(1000 + piece))

    def _born(self, x: torch.Tensor) -> torch.Tensor:
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(x, self._died)
        return x

    def _died(self) -> None:
        self.alive -= 1


def deal(pieces: int, fails_at: int | None = None) -> tuple[list[float], int, int, str]:
    """What came in, pieces made here, the most results alive at once, and the error that the first rank met."""
    shared, work, seen, failure = Deal.to_all_ranks(), Counted(), [], ""
    if not shared.first:
        shared.lend(pieces, work)
        return [], work.made, work.most, ""
    try:
        with shared.results(pieces, work, work.empty) as results:
            for x in results:
                if len(seen) == fails_at:
                    raise ClipError("this one")
                assert len(x) == 1000 + len(seen)
                seen.append(float(x.sum() / len(x)))
                del x
    except ClipError as error:
        failure = str(error)
    return seen, work.made, work.most, failure
