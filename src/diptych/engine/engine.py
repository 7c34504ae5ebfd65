"""`Engine`: one checkpoint, loaded once, on one rank or many; requests in, clips out."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import numpy as np
import numpy.typing as npt

from diptych.codecs.video import OnFrames
from diptych.engine.auto import check_ranks, chosen_layout, given_layout
from diptych.engine.components import Components
from diptych.engine.options import (
    Options,
    check_cache,
    pick_bytes,
    pick_cache,
    pick_device,
    pick_dtype,
    pick_modulation,
    pick_offload,
    pick_pipefusion,
    pick_precision,
    pick_text_precision,
)
from diptych.engine.order import Order, take_batch
from diptych.engine.placement import settled
from diptych.engine.progress import OnProgress, Progress
from diptych.engine.runner import Runner
from diptych.engine.stages import Stages
from diptych.errors import LayoutError, RequestError
from diptych.media.clip import Clip
from diptych.media.files import check_folder
from diptych.model.checkpoint import Checkpoint
from diptych.parallel.fit import check_fit
from diptych.parallel.layout import Layout
from diptych.planner.choices import Limits
from diptych.request import ClipDefaults, ClipRequest
from diptych.sampling.caches import CachePlan

STEP_TIMEOUT = 1800.0
"""Seconds of silence after which ranks are taken for hung."""
MAX_STEP_TIMEOUT = 1e6
"""Eleven days; the system's own waiting counts milliseconds in 31 bits."""


class Executor(Protocol):
    """Where the work runs. `generate` returns None on a rank that does not hold the result."""

    def generate(
        self, orders: Sequence[Order], on_step: OnProgress | None, on_frames: OnFrames | None = None
    ) -> list[Clip] | None: ...
    def close(self) -> None: ...


class InProcess:
    """One rank: this process."""

    def __init__(self, options: Options, on_progress: OnProgress | None) -> None:
        self._runner = Runner(Components.load(options, options.device, first=True, on_progress=on_progress))

    def generate(
        self, orders: Sequence[Order], on_step: OnProgress | None, on_frames: OnFrames | None = None
    ) -> list[Clip]:
        return self._runner.generate(orders, Stages(on_step), on_frames)

    def close(self) -> None:
        del self._runner


class Engine:
    """Holds a loaded checkpoint. Use `Engine.load`; close it, or use it in a `with` block.

    One clip at a time: calls from several threads wait for each other. Nothing computed for one request can be seen
    by the next.
    """

    def __init__(
        self, checkpoint: Checkpoint, executor: Executor, cache: CachePlan | None = None, layout: Layout | None = None
    ) -> None:
        self.checkpoint = checkpoint
        self._cache = cache
        self._layout = layout or Layout()
        self._executor: Executor | None = executor
        self._lock = threading.Lock()
        self._working: int | None = None  # the thread that holds the lock

    @classmethod
    def load(
        cls,
        model: str | Path | Checkpoint | None = None,
        *,
        layout: str | Layout | None = None,
        device: str | None = None,
        dtype: str | None = None,
        precision: str = "exact",
        text_precision: str = "exact",
        modulation: str = "resident",
        cache: str | None = None,
        pipefusion: str | None = None,
        offload: str | None = None,
        memory: str | int | None = None,
        decode_memory: str | int | None = None,
        step_timeout: float = STEP_TIMEOUT,
        trace: str | Path | None = None,
        on_progress: OnProgress | None = None,
    ) -> Engine:
        """Load a checkpoint.

        model: a folder in Diffusers layout, a hub id, or a name such as `lite-distill`.
        layout: how ranks share each clip, such as `cfg=2,ulysses=4`, or `auto` for the fastest that fits the GPUs here.
        More than one rank: rank processes are started and supervised here, or, started by torchrun, this process joins
        the others as one rank.
        device: `cpu`, `cuda` or `cuda:N`; default the first GPU, else the CPU.
        dtype: `float32`, `bfloat16` or `float16` for matrix products and attention; default by the device.
        precision: `exact`, or `fp8`: products on video tokens in fp8, and scores of video self-attention in int8 where
        heads are of 128, an approximation that every report names. `fp8:N` keeps attention exact in the first N steps;
        `fp8:steps=N,first=N,last=N`, each of which may be left out, also keeps so many blocks at the beginning and the
        end as they are without fp8.
        text_precision: `exact`, or `8bit`, `nf4` (4 bits, by bitsandbytes): the language model's weights are rounded,
        an approximation that every report names; 7.1 or 4.4 GiB instead of 13.2.
        modulation: `resident`, or `tables`: its weights wait in host memory, and each request computes all of its
        steps' modulations first. The same bits, and 9 to 19 GB less on the device for Pro.
        cache: predict some forwards from earlier ones, such as `magcache` or `magcache:0.12,2,0.2` (threshold, longest
        run, share of steps computed first): an approximation that every report names. Default: none.
        pipefusion: with a layout such as `pipeline=2`, `WARMUP,PATCHES`: so many first steps are exact, and so many
        patches follow each other through the stages; default 2 steps, and 2 patches a stage. An approximation that
        every report names.
        offload: `none`; `model`: each model waits in host memory and is on the device only while it is used; `block`:
        so do the transformer's blocks, of which as many stay as `memory` has room for, or two at a time. The same bits.
        Default: `none`, or with `memory` the first of these that fits.
        memory: what all of this may take on each device, such as `22GiB`: a clip that does not fit is refused.
        decode_memory: what decoding the picture may take, such as `6GiB`: with less than the default needs, the picture
        is decoded in tiles, whose seams are blended. Default: windows in time only, as diffusers does.
        step_timeout: seconds that ranks may be silent before they are taken for hung.
        trace: folder to which every clip writes what each rank did with its time; `diptych trace` draws it. Traced
        clips run a little slower, and their reports have a `trace`.
        on_progress: told of downloading and loading.

        Raises `CheckpointError`, `LayoutError` or `RequestError`, each one sentence.
        """
        plan = given_layout(layout)
        where = pick_device(device)
        working = pick_dtype(dtype, where)
        if not isinstance(step_timeout, int | float) or not 0 < step_timeout <= MAX_STEP_TIMEOUT:
            raise RequestError("step_timeout", step_timeout, f"seconds above 0, at most {MAX_STEP_TIMEOUT:,.0f}")
        joined = _torchrun_world()
        # What needs no checkpoint is refused before one is fetched.
        if plan is not None:
            check_ranks(plan, where, joined)
        arithmetic = pick_precision(precision, where, working)
        text = pick_text_precision(text_precision)
        fixed, mode = pick_modulation(modulation), pick_offload(offload)
        budget, for_decoding = pick_bytes("memory", memory), pick_bytes("decode_memory", decode_memory)
        folder = None if trace is None else Path(trace).absolute()
        if folder is not None:
            check_folder(folder)
        checkpoint = model if isinstance(model, Checkpoint) else open_checkpoint(model, on_progress)
        arithmetic.check(checkpoint.transformer.num_visual_blocks)
        if plan is None:
            limits = Limits(precision=arithmetic, text_precision=text, modulation=fixed, offload=mode, budget=budget)
            plan = chosen_layout(checkpoint, where, joined, limits)
            check_ranks(plan, where, joined)
        check_fit(plan, checkpoint.transformer)
        chosen = pick_cache(cache, checkpoint)
        pipe = pick_pipefusion(pipefusion, plan)
        check_cache(chosen, plan)
        options = Options(
            checkpoint,
            plan,
            where,
            working,
            timedelta(seconds=step_timeout),
            decode_budget=for_decoding,
            trace=folder,
            precision=arithmetic,
            text_precision=text,
            modulation=fixed,
            memory=budget,
            pipe=pipe,
        )
        options = settled(options, mode)
        return cls(checkpoint, _executor(options, on_progress, joined), chosen, plan)

    @property
    def layout(self) -> Layout:
        """How ranks share each clip; what `auto` chose."""
        return self._layout

    @property
    def defaults(self) -> ClipDefaults:
        """What the checkpoint fills in where a request says nothing."""
        return self.checkpoint.defaults

    def generate(
        self,
        request: ClipRequest,
        on_step: OnProgress | None = None,
        *,
        cache: str | None = None,
        on_frames: Callable[[npt.NDArray[np.uint8]], None] | None = None,
    ) -> Clip | None:
        """Make one clip. Returns it, or None on a torchrun rank other than the first.

        on_step: told of every stage and step; raise `Cancelled` in it to stop at that step, on all ranks.
        cache: for this clip another step cache than the engine's, or `none`.
        on_frames: given the next frames (N, H, W, 3) of the clip as soon as they are decoded, in order, each once, and
        before the clip is checked. They are part of the clip: not to be changed. What takes long with them, such as
        `media.film.Film`, belongs on a thread of its own.
        Raises `RequestError` or `MediaError` for a request that cannot be honoured, before any weight is touched,
        `ClipError` for a result that is not fit to be called a clip, and `RankError` with a rank's own traceback.
        """
        told = None if on_frames is None else lambda _, frames: on_frames(frames)
        clips = self.generate_batch([request], on_step, cache=cache, on_frames=told)
        return None if clips is None else clips[0]

    def generate_batch(
        self,
        requests: Sequence[ClipRequest],
        on_step: OnProgress | None = None,
        *,
        cache: str | None = None,
        on_frames: OnFrames | None = None,
    ) -> list[Clip] | None:
        """Make several clips in one batch: equal in all but prompt, negative, image and seed. Else as `generate`, but
        that `on_frames` is given the number of the clip before its frames: one clip after the other.
        """
        plan = self._cache if cache is None else pick_cache(cache, self.checkpoint)
        check_cache(plan, self._layout)
        orders = take_batch(requests, self.defaults, plan)
        with self._alone("generate"):
            if self._executor is None:
                raise RuntimeError("this engine is closed; load another to generate")
            return self._executor.generate(orders, on_step, on_frames)

    def close(self) -> None:
        """Free the weights and end the rank processes. Waits for a clip in progress; safe to call twice."""
        with self._alone("close"):
            if self._executor is not None:
                self._executor.close()
                self._executor = None

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """One call at a time. Raises `RuntimeError` for one from within another, which would wait for itself."""
        if self._working == threading.get_ident():
            raise RuntimeError(f"{what} was called from a callback of the same engine; raise Cancelled in it to stop")
        with self._lock:
            self._working = threading.get_ident()
            try:
                yield
            finally:
                self._working = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def open_checkpoint(model: str | Path | None, on_progress: OnProgress | None = None) -> Checkpoint:
    """Open what `model` names, downloading if need be; None is the default model."""
    start = time.perf_counter()

    def on_bytes(done: int, total: int) -> None:
        if on_progress is not None:
            on_progress(Progress("download", done >> 20, max(total >> 20, 1), time.perf_counter() - start))

    return Checkpoint.open("demo" if model is None else model, on_bytes=on_bytes)


def _executor(options: Options, on_progress: OnProgress | None, joined: int | None) -> Executor:
    if options.layout.world == 1:
        return InProcess(options, on_progress)
    if joined is not None:
        from diptych.engine.joined import Joined

        return Joined(options, on_progress)
    from diptych.engine.spawned import Spawned

    return Spawned(options, on_progress)


def _torchrun_world() -> int | None:
    """How many processes torchrun started with this one, or None when it did not."""
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys():
        return None
    for name in ("RANK", "WORLD_SIZE"):
        if not os.environ[name].isdecimal():
            raise LayoutError(f"{name} = {os.environ[name]!r} in the environment is not accepted: a whole number.")
    return int(os.environ["WORLD_SIZE"])
