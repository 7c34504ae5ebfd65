"""Rank processes on this host: started, supervised, and started anew when one fails.

The parent is no rank: it holds no weights, so whatever happens to a rank, the parent lives to tell.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe, wait

from torch._C._distributed_c10d import TCPStore

from diptych.codecs.video import OnFrames
from diptych.engine.messages import Cancel, Close, Failed, Finished, Frames, FromRank, Generate, Ready, Told, ToRank
from diptych.engine.options import Options
from diptych.engine.order import Order
from diptych.engine.progress import OnProgress
from diptych.engine.ranks import Place
from diptych.errors import RankError
from diptych.media.clip import Clip

START_SECONDS = 300.0
"""How long ranks may be silent while they start: importing and connecting say nothing."""
CLOSE_SECONDS = 10.0
"""How long ranks get to end by themselves."""


class Spawned:
    """An `Executor` over `layout.world` processes."""

    def __init__(self, options: Options, on_progress: OnProgress | None) -> None:
        self._options = options
        self._ranks: list[_Rank] = []
        self._start()
        try:
            self._await_ready(on_progress)
        except BaseException:
            self._end(0.0)
            raise

    def generate(
        self, orders: Sequence[Order], on_step: OnProgress | None, on_frames: OnFrames | None = None
    ) -> list[Clip]:
        """Run a batch on all ranks. A rank that fails, dies or stays silent fails this batch only."""
        if not self._ranks:
            self._start()
        self._await_ready(None)
        try:
            for rank in self._ranks:
                rank.send(Generate(list(orders), progress=on_step is not None, frames=on_frames is not None))
            done = self._until_over(on_step, on_frames)
        except BaseException:
            # Ctrl-C at any other point: ranks in the middle of this job cannot take the next.
            self._end(0.0)
            raise
        if isinstance(done, Finished):
            return done.clips
        raise done

    def _until_over(self, on_step: OnProgress | None, on_frames: OnFrames | None) -> Finished | BaseException:
        """The clips, or what the caller is to see instead; either way the ranks are ready for another job."""
        interrupted: BaseException | None = None
        while True:
            message = self._next_message()
            if isinstance(message, Finished) and interrupted is None:
                return message
            if isinstance(message, Finished | Failed) and interrupted is not None:
                return interrupted
            if isinstance(message, Failed):
                return message.error
            if isinstance(message, Told | Frames) and interrupted is None:
                try:
                    if isinstance(message, Told) and on_step is not None:
                        on_step(message.progress)
                    elif isinstance(message, Frames) and on_frames is not None:
                        on_frames(message.clip, message.frames)
                except BaseException as error:  # Cancelled, or a fault of the caller's: the ranks stop either way
                    interrupted = error
                    self._ranks[0].send(Cancel())

    def close(self) -> None:
        for rank in self._ranks:
            rank.send(Close())
        self._end(CLOSE_SECONDS)

    def _start(self) -> None:
        world = self._options.layout.world
        self._store = TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        self._ranks = [_Rank(Place(index, world, self._store.port), self._options) for index in range(world)]

    def _await_ready(self, on_progress: OnProgress | None) -> None:
        while not all(rank.ready for rank in self._ranks):
            message = self._next_message()
            if isinstance(message, Failed):
                raise message.error
            if isinstance(message, Told) and on_progress is not None:
                try:
                    on_progress(message.progress)
                except BaseException:
                    self._end(0.0)
                    raise

    def _next_message(self) -> FromRank:
        """The next thing a rank says. A rank that is gone or silent for too long becomes a `Failed`, and so does
        Ctrl-C in the meantime; after a failure that is not `whole` all ranks are ended and started anew."""
        try:
            message = self._listen()
        except KeyboardInterrupt:
            self._end(0.0)
            raise
        if isinstance(message, Failed) and not message.whole:
            self._end(0.0)
            self._start()
        return message

    def _listen(self) -> FromRank:
        pipes = {rank.pipe: rank for rank in self._ranks}
        seconds = self._options.step_timeout.total_seconds()
        if not all(rank.ready for rank in self._ranks):
            seconds = max(seconds, START_SECONDS)
        heard = wait(list(pipes), seconds)
        if not heard:
            return Failed(RankError(f"no rank said anything for {seconds:g} s; they were taken for hung"), False)
        rank = pipes[heard[0]]  # type: ignore[index]
        message = rank.receive()
        if isinstance(message, Failed) and not message.whole:
            return self._cause(rank, message)
        if isinstance(message, Ready):
            rank.ready = True
        return message

    def _cause(self, first: _Rank, failed: Failed) -> Failed:
        """What `first` told, unless another rank was killed: then the first only tells of a connection it lost."""
        for rank in self._ranks:
            if rank is not first and (rank.process.poll() or 0) < 0:
                return Failed(rank.lost(), whole=False)
        return failed

    def _end(self, seconds: float) -> None:
        """End all ranks: by themselves within `seconds`, else by force. None is left when this returns."""
        deadline = time.monotonic() + seconds
        for rank in self._ranks:
            rank.wait(max(0.0, deadline - time.monotonic()))
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.wait()
            rank.pipe.close()
            rank.lifeline.close()
        self._ranks = []


class _Rank:
    """The parent's end of one rank process.

    A program of its own rather than a multiprocessing child: those import the caller's main module again, which a
    notebook does not have and a script without a guard does not survive. A session of its own: Ctrl-C in a terminal
    reaches the parent, and the parent decides.
    """

    def __init__(self, place: Place, options: Options) -> None:
        self.place = place
        self.ready = False
        self.pipe, theirs = Pipe()
        rank_end, self.lifeline = Pipe(duplex=False)
        ends = (theirs.fileno(), rank_end.fileno())
        command = [sys.executable, "-m", "diptych.engine.rank_process", *map(str, ends)]
        # Standard output is the caller's for results; what a library prints on a rank goes to standard error.
        self.process = subprocess.Popen(
            command, pass_fds=ends, stdin=subprocess.DEVNULL, stdout=2, start_new_session=True
        )
        theirs.close()
        rank_end.close()
        self.send((place, options))

    def wait(self, seconds: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(seconds)

    def send(self, message: ToRank | tuple[Place, Options]) -> None:
        """A rank that is gone is found out by listening, not here."""
        with contextlib.suppress(OSError):
            self.pipe.send(message)

    def receive(self) -> FromRank:
        pipe: Connection = self.pipe
        try:
            message: FromRank = pipe.recv()
        except (EOFError, OSError):
            self.wait(5.0)
            return Failed(self.lost(), whole=False)
        return message

    def lost(self) -> RankError:
        return RankError(f"rank {self.place.rank} ended: {_death(self.process.poll())}")


def _death(status: int | None) -> str:
    if status == -9:
        return "killed by signal 9; the system's memory may have run out"
    if status is not None and status < 0:
        return f"killed by signal {-status}"
    return f"exit status {status}"
