"""A rank that torchrun started: every process calls the engine alike, and the first gets the clips."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch.distributed as dist

from diptych.codecs.video import OnFrames
from diptych.engine.options import Options, check_room
from diptych.engine.order import Order
from diptych.engine.progress import OnProgress, Progress
from diptych.engine.ranks import join
from diptych.engine.stages import Stages
from diptych.media.clip import Clip


class Joined:
    """An `Executor` that is one rank of several; what stops the first rank stops all at the same step."""

    def __init__(self, options: Options, on_progress: OnProgress | None) -> None:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        check_room(options.layout, options.device, int(os.environ.get("LOCAL_WORLD_SIZE", world)))
        self._team = join(options, rank, world, on_progress if rank == 0 else None)

    def generate(
        self, orders: Sequence[Order], on_step: OnProgress | None, on_frames: OnFrames | None = None
    ) -> list[Clip] | None:
        raised: list[BaseException] = []

        def tell(progress: Progress) -> None:
            if on_step is None or raised:
                return
            try:
                on_step(progress)
            except BaseException as error:  # told to all ranks after this step, then raised here
                raised.append(error)

        stages = Stages(tell if self._team.rank == 0 else None)
        try:
            clips = self._team.generate(orders, stages, lambda: bool(raised), on_frames)
        finally:
            if raised:
                raise raised[0]
        return clips

    def close(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
