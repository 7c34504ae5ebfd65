"""A rank process: joins the others, loads its part, serves jobs until told to end or its parent is gone."""

from __future__ import annotations

import contextlib
import os
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store, TCPStore

from diptych.engine.components import Components
from diptych.engine.messages import Cancel, Failed, Finished, Frames, FromRank, Generate, Ready, Told, ToRank
from diptych.engine.options import Options
from diptych.engine.progress import Progress
from diptych.engine.runner import Runner
from diptych.engine.sharing import sharing_for
from diptych.engine.stages import Stages
from diptych.engine.team import Team
from diptych.errors import Cancelled, DeviceMemoryError, RankError, UserError
from diptych.parallel.weights import WeightSplit


@dataclass(frozen=True)
class Place:
    """Where a rank stands: rank of world, meeting the others at `port` on loopback."""

    rank: int
    world: int
    port: int


def rank_main(pipe: Connection, lifeline: Connection) -> None:
    """The whole life of the process. `lifeline` carries nothing: it ends when the parent does, however it does."""
    threading.Thread(target=_die_with_parent, args=(lifeline,), daemon=True).start()
    place: Place | None = None
    try:
        place, options = pipe.recv()
        team = _join(place, options, _loading(pipe, place))
        pipe.send(Ready())
        _serve(team, pipe)
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone
    except BaseException as error:
        _send(pipe, Failed(_shown(error, place), whole=False))
        os._exit(1)  # other ranks may sit in a collective; do not wait for them in a destructor
    os._exit(0)


def _die_with_parent(lifeline: Connection) -> None:
    with contextlib.suppress(EOFError, OSError):
        lifeline.recv()
    os._exit(1)


def _join(place: Place, options: Options, on_progress: Callable[[Progress], None] | None) -> Team:
    os.environ.update(RANK=str(place.rank), LOCAL_RANK=str(place.rank), WORLD_SIZE=str(place.world))
    store = TCPStore("127.0.0.1", place.port, place.world, is_master=False, timeout=timedelta(seconds=120))
    return join(options, place.rank, place.world, on_progress, store=store)


def join(
    options: Options,
    rank: int,
    world: int,
    on_progress: Callable[[Progress], None] | None,
    *,
    store: Store | None = None,
) -> Team:
    """Make this process rank `rank`: process groups, the mesh of the layout, and this rank's components.

    Without a store the rendezvous comes from torchrun's environment.
    """
    device = options.device_of(int(os.environ.get("LOCAL_RANK", rank)))
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif "OMP_NUM_THREADS" not in os.environ:  # ranks on one host share its cores
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    patience = options.step_timeout * 2  # the parent's patience ends first
    if store is None:
        dist.init_process_group(backend, timeout=patience)
    else:
        dist.init_process_group(backend, timeout=patience, store=store, rank=rank, world_size=world)
    control = dist.new_group(backend="gloo", timeout=patience)
    assert isinstance(control, dist.ProcessGroup)
    sharing = sharing_for(options.layout, device, options.kernels, options.pipe)
    stage = options.layout.stage(rank)
    split = WeightSplit.of(options.layout, device.type)
    components = Components.load(options, device, first=rank == 0, stage=stage, split=split, on_progress=on_progress)
    return Team(Runner(components, sharing, rank), control)


def _serve(team: Team, pipe: Connection) -> None:
    while True:
        message: ToRank = pipe.recv()
        if isinstance(message, Cancel):
            continue  # of a job that is over
        if not isinstance(message, Generate):
            return
        tell = _teller(pipe) if message.progress and team.rank == 0 else None
        show = (lambda clip, frames: pipe.send(Frames(clip, frames))) if message.frames and team.rank == 0 else None

        try:
            clips = team.generate(message.orders, Stages(tell), partial(_told_to_stop, pipe), show)
        except (Cancelled, UserError) as error:
            if team.rank == 0:
                pipe.send(Failed(error, whole=True))
        else:
            if clips is not None:
                pipe.send(Finished(clips))


def _told_to_stop(pipe: Connection) -> bool:
    """Whether the parent wants the present job stopped; nothing else is said to the first rank during a job."""
    if not pipe.poll():
        return False
    message = pipe.recv()
    assert isinstance(message, Cancel), message
    return True


def _teller(pipe: Connection) -> Callable[[Progress], None]:
    def tell(progress: Progress) -> None:
        if progress.preview is not None:
            progress = replace(progress, preview=_Kept(progress.preview().numpy()))
        pipe.send(Told(progress))

    return tell


@dataclass(frozen=True)
class _Kept:
    """A preview that has crossed a process: calling it gives the tensor that came along."""

    latents: npt.NDArray[np.float32]

    def __call__(self) -> torch.Tensor:
        return torch.from_numpy(self.latents)


def _loading(pipe: Connection, place: Place) -> Callable[[Progress], None] | None:
    return (lambda progress: pipe.send(Told(progress))) if place.rank == 0 else None


def _shown(error: BaseException, place: Place | None) -> BaseException:
    if isinstance(error, UserError | Cancelled | DeviceMemoryError):
        return error
    rank = "?" if place is None else place.rank
    kind = type(error).__name__  # a MemoryError says nothing else
    return RankError(f"rank {rank} failed: {kind}: {error}\n\n" + "".join(traceback.format_exception(error)))


def _send(pipe: Connection, message: FromRank) -> None:
    with contextlib.suppress(OSError):
        pipe.send(message)
