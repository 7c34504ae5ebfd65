"""Before anything is timed that a user sees: do the ranks add up right, and how fast do bytes travel between them?"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from diptych.attention.collectives import start_all_gather, start_all_to_all, start_shift
from diptych.attention.place import Group
from diptych.attention.plan import split
from diptych.bench.geometry import Geometry, config_named

if TYPE_CHECKING:
    from multi_gpu_ranks import Bench

COPIES = 3


def links(bench: Bench) -> None:
    """All-reduce; copies from GPU to GPU; all-gather; the exchanges of one block at the models' sizes."""
    if bench.world == 1:
        bench.note("alone", "one rank has no links")
        return
    numbers = (1 << 12) if bench.quick else (1 << 27)
    bench.note("all-reduce", all_reduce(bench, numbers))
    if bench.device.type == "cuda":
        bench.note("copies, GB/s", copies(bench, numbers))
    bench.note("send and receive, GB/s", neighbours(bench, numbers))
    whole = dist.group.WORLD
    assert whole is not None
    group = Group(whole.group_name, whole.size(), whole.rank())
    bench.note("all-gather", gather_all(bench, numbers, group))
    for name in ("tiny",) if bench.quick else ("pro", "lite"):
        bench.note(f"{name}: a block", exchanges(bench, name, group))


def all_reduce(bench: Bench, numbers: int) -> dict[str, Any]:
    """The sum of 1 .. W in every number, on every rank. Raises where it is not."""
    x = torch.full((numbers,), bench.rank + 1.0, device=bench.device)
    dist.all_reduce(x)
    want = bench.world * (bench.world + 1) / 2
    wrong = int((x != want).sum())
    if bench.most(wrong):
        raise AssertionError(f"rank {bench.rank}: {wrong} of {numbers} sums are not {want}")
    return {"right": True} | rate(
        bench, lambda: dist.all_reduce(x), int(2 * (bench.world - 1) / bench.world * x.nbytes)
    )


def copies(bench: Bench, numbers: int) -> dict[str, float]:
    """From the first GPU to each other one by a plain copy, both ways, started by one process."""
    found: dict[str, float] = {}
    if bench.rank == 0:
        here = torch.ones(numbers, device=bench.device)
        for other in range(1, bench.world):
            there = torch.empty(numbers, device=torch.device("cuda", other))
            for name, target, source in ((f"0 to {other}", there, here), (f"{other} to 0", here, there)):
                target.copy_(source)
                best = 0.0
                for _ in range(COPIES):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    begin.record()
                    target.copy_(source)
                    end.record()
                    torch.cuda.synchronize()
                    best = max(best, source.nbytes / begin.elapsed_time(end) / 1e6)
                found[name] = best
            found[f"peer access to {other}"] = float(torch.cuda.can_device_access_peer(0, other))
    bench.most(0.0)
    return found


def neighbours(bench: Bench, numbers: int) -> float:
    """Each rank sends to the next and receives from the one before, all at once."""
    x, y = (torch.ones(numbers, dtype=torch.bfloat16, device=bench.device) for _ in range(2))
    after, before = (bench.rank + 1) % bench.world, (bench.rank - 1) % bench.world

    def pass_on() -> None:
        todo = [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, y, before)]
        for request in dist.batch_isend_irecv(todo):
            request.wait()

    return float(rate(bench, pass_on, x.nbytes)["GB/s a rank"])


def gather_all(bench: Bench, numbers: int, group: Group) -> dict[str, Any]:
    x = torch.ones(numbers, dtype=torch.bfloat16, device=bench.device)
    return rate(bench, lambda: start_all_gather(x, group).wait(), (bench.world - 1) * x.nbytes)


def exchanges(bench: Bench, model: str, group: Group) -> dict[str, Any]:
    """What Ulysses, the ring and the merge of one block move, with nothing computed between."""
    config = config_named(model)
    size = Geometry.parse("64x32x9" if bench.quick else "864x480x125")
    own = split(size.tokens, bench.world)[bench.rank]
    kind = {"dtype": torch.bfloat16, "device": bench.device}
    there, back = torch.ones(3 * own * config.model_dim, **kind), torch.ones(own * config.model_dim, **kind)
    half = 2 * own * config.model_dim
    shift = torch.ones(half, **kind)
    merged = torch.ones(size.audio_tokens, config.heads_a, config.head_dim + 2, **kind)

    def evenly(x: Tensor) -> Callable[[], object]:
        sent = split(x.numel(), bench.world)
        sizes = bench.gather(sent)
        received = [of_rank[bench.rank] for of_rank in sizes]
        return lambda: start_all_to_all(x, sent, received, group).wait()

    lengths = bench.gather(half)
    away = (bench.world - 1) / bench.world
    return {
        "q, k, v to heads": rate(bench, evenly(there), int(away * there.nbytes)),
        "heads to tokens": rate(bench, evenly(back), int(away * back.nbytes)),
        "ring: k, v on": rate(
            bench, lambda: start_shift(shift, lengths[(bench.rank - 1) % bench.world], group).wait(), shift.nbytes
        ),
        "merge": rate(bench, lambda: start_all_gather(merged, group).wait(), (bench.world - 1) * merged.nbytes),
    }


def rate(bench: Bench, call: Callable[[], object], sent: int) -> dict[str, Any]:
    """Milliseconds, and bytes that this rank sends a second: the best of several rows of calls, as the slowest rank
    saw them."""

    repeats, in_a_row = (1, 2) if bench.quick else (3, 10)

    def row() -> None:
        for _ in range(in_a_row):
            call()

    call()
    spent = min(bench.wall(row) for _ in range(repeats)) / in_a_row
    return {"ms": spent * 1e3, "GB/s a rank": sent / spent / 1e9, "bytes": sent}
