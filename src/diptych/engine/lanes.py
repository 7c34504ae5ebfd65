"""Traces of all ranks of one clip held side by side: who waited for whom, and when all of them computed."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from itertools import groupby
from pathlib import Path
from typing import Any

from diptych.engine.tracing import ATTENTION, EXCHANGE, LINEAR, OTHER, Exchange, RankTrace, StepTrace
from diptych.errors import MediaError
from diptych.media.files import replacing

Interval = tuple[float, float]


def summarise(traces: Sequence[RankTrace]) -> dict[str, Any]:
    """What a report tells of a traced clip.

    ranks: for each, seconds a step of `attention`, `linear`, `other`, `communication` (standing still while bytes
    travel) and `waiting` (standing still until the slowest rank of the group arrives), and bytes sent a block.
    all_busy: the share of the time from the first step's start to the last step's end in which every rank computed.
    """
    waits = waiting(traces)
    ranks = []
    for trace in traces:
        steps = max(len(trace.steps), 1)
        mean = {kind: sum(step.sums[kind] for step in trace.steps) / steps for kind in (ATTENTION, LINEAR, OTHER)}
        stood = sum(step.sums[EXCHANGE] for step in trace.steps) / steps
        waited = waits[trace.rank] / steps
        ranks.append(
            {
                "rank": trace.rank,
                "seconds_per_step": {
                    **{kind: round(value, 6) for kind, value in mean.items()},
                    "communication": round(max(stood - waited, 0.0), 6),
                    "waiting": round(waited, 6),
                },
                "bytes_per_block": trace.bytes_in_blocks // max(trace.forwards * trace.blocks, 1),
                **_gpu(trace),
            }
        )
    return {"ranks": ranks, "all_busy": round(all_busy(traces), 4)}


def waiting(traces: Sequence[RankTrace]) -> dict[int, float]:
    """Seconds that each rank stood still before the last rank of its group had issued the same collective.

    Collectives of one group are issued in one order by all of its ranks, so the n-th here is the n-th there.
    """
    seconds = dict.fromkeys((trace.rank for trace in traces), 0.0)
    numbered = [
        ((group, n), trace.rank, exchange)
        for trace in traces
        for group, exchanges in _by_group(trace)
        for n, exchange in enumerate(exchanges)
    ]
    numbered.sort(key=lambda item: item[0])
    for _, items in groupby(numbered, key=lambda item: item[0]):
        same = list(items)
        last = max(exchange.issued for _, _, exchange in same)
        for _, rank, exchange in same:
            seconds[rank] += max(min(exchange.end, last) - exchange.start, 0.0)
    return seconds


def all_busy(traces: Sequence[RankTrace]) -> float:
    """Share of the denoising time in which no rank stood still, from the first start to the last end."""
    start = min(step.start for trace in traces for step in trace.steps)
    end = max(step.end for trace in traces for step in trace.steps)
    idle: list[Interval] = []
    for trace in traces:
        idle.append((start, trace.steps[0].start))
        idle.append((trace.steps[-1].end, end))
        idle += [(x.start, x.end) for step in trace.steps for x in step.exchanges]
    return 1 - sum(b - a for a, b in union(idle)) / (end - start)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The intervals merged where they touch, in order."""
    merged: list[Interval] = []
    for a, b in sorted(intervals):
        if b <= a:
            continue
        if merged and a <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(b, merged[-1][1]))
        else:
            merged.append((a, b))
    return merged


def write_traces(folder: Path, traces: Sequence[RankTrace]) -> None:
    """One JSON file a rank, `rank-0.json` ...; files of an earlier clip are removed."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.glob("rank-*.json"):
            old.unlink()
    except OSError as error:
        raise MediaError(f"cannot write traces to {folder}: {error.strerror}.") from error
    for trace in traces:
        with replacing(folder / f"rank-{trace.rank}.json") as file:
            file.write_text(json.dumps(asdict(trace)))


def read_traces(folder: Path) -> list[RankTrace]:
    """The traces of one clip, by rank. Raises `MediaError` for a folder that holds none or a damaged one."""
    traces = []
    for file in sorted(folder.glob("rank-*.json")):
        try:
            held = json.loads(file.read_text())
            steps = [
                StepTrace(**(step | {"exchanges": [Exchange(**x) for x in step["exchanges"]]}))
                for step in held["steps"]
            ]
            traces.append(RankTrace(**(held | {"steps": steps})))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise MediaError(f"cannot read the trace {file}: it is damaged ({error}).") from error
    if not traces or not all(trace.steps for trace in traces):
        raise MediaError(f"{folder} holds no traces; make some with diptych generate --trace {folder}.")
    return sorted(traces, key=lambda trace: trace.rank)


def _by_group(trace: RankTrace) -> list[tuple[str, list[Exchange]]]:
    groups: dict[str, list[Exchange]] = {}
    for step in trace.steps:
        for exchange in step.exchanges:
            groups.setdefault(exchange.group, []).append(exchange)
    return list(groups.items())


def _gpu(trace: RankTrace) -> dict[str, Any]:
    if not trace.gpu:
        return {}
    rates = [rate for _, rate, _ in trace.gpu]
    return {
        "gpu_utilisation": round(sum(rates) / len(rates), 1),
        "gpu_memory_gib": round(max(used for _, _, used in trace.gpu) / 2**30, 2),
    }
