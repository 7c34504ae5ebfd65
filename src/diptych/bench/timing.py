"""Medians of timings: CUDA events on a GPU, the wall clock elsewhere."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Mapping
from itertools import pairwise

import torch


def seconds(call: Callable[[], object], device: torch.device, repeats: int, warmup: int = 1) -> list[float]:
    """The time of each of `repeats` calls, after `warmup` others."""
    for _ in range(warmup):
        call()
    return [once(call, device) for _ in range(repeats)]


def once(call: Callable[[], object], device: torch.device) -> float:
    """The time of one call, in seconds."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def median(call: Callable[[], object], device: torch.device, repeats: int = 5, warmup: int = 2) -> float:
    return statistics.median(seconds(call, device, repeats, warmup))


def alternating(
    calls: Mapping[str, Callable[[], object]], device: torch.device, repeats: int, warmup: int = 1
) -> dict[str, list[float]]:
    """The times of several calls, taken in turns, so that a machine that changes its pace changes it for all."""
    for call in calls.values():
        for _ in range(warmup):
            call()
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name].append(once(call, device))
    return times


Turns = Mapping[Hashable, tuple[Callable[[], object], int]]
"""Calls, and how often in a row each is made."""


def in_turns(calls: Turns, device: torch.device, least_seconds: float) -> dict[Hashable, float]:
    """Seconds of each call where all follow one another without a pause.

    Rounds until `least_seconds` have passed, two at least; medians of the later half. A GPU at its power limit slows
    down for what follows, too, so that a call takes longer in company than alone.
    """
    rounds: list[dict[Hashable, float]] = []
    begun = time.perf_counter()
    while len(rounds) < 2 or time.perf_counter() - begun < least_seconds:
        rounds.append(_round(calls, device))
    later = rounds[len(rounds) // 2 :]
    return {name: statistics.median(seconds[name] for seconds in later) for name in calls}


def _round(calls: Turns, device: torch.device) -> dict[Hashable, float]:
    if device.type != "cuda":
        return {
            name: statistics.fmean(once(call, device) for _ in range(times)) for name, (call, times) in calls.items()
        }
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    marks[0].record()
    for mark, (call, times) in zip(marks[1:], calls.values(), strict=True):
        for _ in range(times):
            call()
        mark.record()
    marks[-1].synchronize()
    spent = (begin.elapsed_time(end) / 1e3 for begin, end in pairwise(marks))
    return {name: seconds / times for (name, (_, times)), seconds in zip(calls.items(), spent, strict=True)}


def peak_memory(call: Callable[[], object], device: torch.device) -> int:
    """Peak bytes that torch held allocated on `device` during one call; 0 where it does not count them."""
    if device.type != "cuda":
        call()
        return 0
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    call()
    torch.cuda.synchronize(device)
    return int(torch.cuda.max_memory_allocated(device))
