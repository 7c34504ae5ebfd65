"""Several ranks on one job: the first prepares and finishes with the help of the others, all denoise, and whatever is
decided is decided once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from diptych.codecs.video import OnFrames
from diptych.engine.order import Order
from diptych.engine.runner import Runner
from diptych.engine.stages import Stages
from diptych.errors import Cancelled
from diptych.media.clip import Clip

T = TypeVar("T")


class Team:
    """This process as one rank of the default process group.

    control: a gloo group of all ranks; decisions and jobs travel on it, so that they never wait for a GPU.
    """

    def __init__(self, runner: Runner, control: dist.ProcessGroup) -> None:
        self.runner, self.control, self.rank = runner, control, dist.get_rank()

    def generate(
        self, orders: Sequence[Order], stages: Stages, stop: Callable[[], bool], on_frames: OnFrames | None = None
    ) -> list[Clip] | None:
        """Make a batch of clips; all ranks call it together, and the first returns them and tells `on_frames`.

        `stop` is asked on the first rank after each step. Raises `Cancelled` on all ranks at the same step.
        What the first rank raises before or after denoising is raised there only, and the others return None.
        """
        prepared: tuple[Any, list[str]] | None = None
        try:
            if self.rank == 0:
                prepared = self.runner.prepare(orders, stages)
            else:
                self.runner.lend_encoder(orders)
        finally:  # also when preparing failed: the others wait to hear whether there is a job
            job = self._broadcast(None if prepared is None else prepared[0])
        if job is None:
            return None

        def after_step(index: int) -> None:
            if self._decide(self.rank == 0 and stop()):
                raise Cancelled(f"stopped after step {index + 1} of {job.resolved.steps}")

        result = self.runner.denoise(job, stages, after_step)
        traces = [] if result.trace is None else self._collect(result.trace)
        if prepared is None:
            self.runner.lend_decoder(job, result)
            return None
        return self.runner.finish(orders, result, stages, prepared[1], traces, on_frames)

    def _broadcast(self, value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def _collect(self, value: T) -> list[T]:
        """Every rank's value, in rank order, on the first rank; elsewhere nothing."""
        if self.rank:
            dist.gather_object(value, None, dst=0, group=self.control)
            return []
        values: list[Any] = [None] * dist.get_world_size()
        dist.gather_object(value, values, dst=0, group=self.control)
        return values

    def _decide(self, flag: bool) -> bool:
        """The first rank's answer, on every rank."""
        answer = torch.tensor([flag], dtype=torch.uint8)
        dist.broadcast(answer, src=0, group=self.control)
        return bool(answer.item())
