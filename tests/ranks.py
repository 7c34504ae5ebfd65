"""Gloo ranks for tests: processes that are started once a session and given functions to run.

    def test_something(ranks):
        results = ranks(4)(function, argument)     # one result a rank, in rank order

Each of the first 4 processes calls `function(argument)` inside a process group of 4. The function must be importable
(module level). Importing torch and the stock models takes many seconds, so one process imports them and the ranks are
its forks, which stay for a file of tests: only the process group is made anew when the number of ranks changes. Nothing
can hang: a rank that raises, dies or exceeds the time limit fails the test with its own traceback, and all processes
are replaced.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

MOST = 4
MOST_GROUPS = 32
"""A mesh is several groups, a group a thread of gloo that wakes a hundred times a second, also when nothing is done."""
SECONDS = 60


class RankError(AssertionError):
    """A rank raised, died, or took too long."""


class RankPool:
    def __init__(self) -> None:
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[Connection] = []
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._generation, self._world, self._groups = 0, 0, 0

    def run(self, world: int, function: Callable[..., Any], args: tuple[Any, ...], seconds: float) -> list[Any]:
        assert 1 <= world <= MOST, f"between 1 and {MOST} ranks, not {world}"
        if not self._processes:
            self._start()
        if world != self._world or self._groups > MOST_GROUPS:
            self._generation, self._world, self._groups = self._generation + 1, world, 0
        rendezvous = str(Path(self._folder.name) / f"{self._generation}")
        for rank in range(world):
            self._pipes[rank].send_bytes(pickle.dumps((world, rank, rendezvous, seconds, function, args)))
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        deadline = time.monotonic() + seconds
        while len(results) + len(failures) < world:
            late = [rank for rank in range(world) if rank not in results and rank not in failures]
            ready = wait([self._pipes[rank] for rank in late], max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                break
            for pipe in ready:
                rank = self._pipes.index(pipe)
                try:
                    fine, value, groups = pickle.loads(pipe.recv_bytes())
                except EOFError:
                    self.close()
                    raise RankError(f"rank {rank} of {world} died") from None
                (results if fine else failures)[rank] = value
                self._groups = max(self._groups, groups)
                if not fine:  # the others may be waiting for it in a collective: for a moment only
                    deadline = min(deadline, time.monotonic() + 2)
        if failures:
            raise RankError("\n".join(f"rank {rank} of {world} raised:\n{text}" for rank, text in failures.items()))
        if len(results) < world:
            raise RankError(f"ranks {late} of {world} did not answer within {seconds:g} s")
        return [results[rank] for rank in range(world)]

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._processes, self._pipes, self._world = [], [], 0

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_IMPORTED_ONCE)
        before = {name: os.environ.get(name) for name in _ENVIRONMENT}
        os.environ.update(_ENVIRONMENT)
        try:
            for _ in range(MOST):
                here, there = context.Pipe()
                process = context.Process(target=_serve, args=(there,), daemon=True)
                process.start()
                there.close()
                self._processes.append(process)
                self._pipes.append(here)
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value


_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1"}
_IMPORTED_ONCE = [
    "diptych.engine.engine",
    "diptych.diffusers",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "diffusers.models",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
]
"""What several files of tests need on their ranks. None of it starts a thread, which a fork would lose."""
_pool: RankPool | None = None


def _shared_pool() -> RankPool:
    global _pool
    if _pool is None:
        _pool = RankPool()
        atexit.register(_pool.close)
    return _pool


def end_ranks() -> None:
    """End the forks; the next file of tests gets new ones. For every ten groups an idle rank takes 1 % of a core."""
    if _pool is not None:
        _pool.close()


@pytest.fixture(scope="session")
def ranks() -> Callable[[int], Callable[..., list[Any]]]:
    """`ranks(world)(function, *args, seconds=60)`: what `function(*args)` returns on each of `world` gloo ranks."""

    def of(world: int) -> Callable[..., list[Any]]:
        def run(function: Callable[..., Any], *args: Any, seconds: float = SECONDS) -> list[Any]:
            return _shared_pool().run(world, function, args, seconds)

        return run

    return of


def _serve(pipe: Connection) -> None:
    """A rank: take functions from the pipe until the other end is gone."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    joined = ""
    while True:
        try:
            world, rank, rendezvous, seconds, function, args = pickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            if rendezvous != joined:
                if joined:
                    dist.destroy_process_group()
                joined, store = rendezvous, dist.FileStore(rendezvous, world)
                dist.init_process_group(
                    "gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=seconds)
                )
            answer = (True, function(*args))
        except BaseException:
            answer = (False, traceback.format_exc())
        groups = len(dist.distributed_c10d._world.pg_map)
        pipe.send_bytes(pickle.dumps((*answer, groups)))
