"""What a rank does with its time while it denoises, measured operator by operator.

Every operator belongs to a kind. On the CPU operators are timed by the host's monotonic clock, which all processes
share; on a GPU by events on the stream, wherever the kind changes, tied to that clock once. What a rank waits for
others or for the wire is what its own stream stands still for: hidden transfers cost nothing and count nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from diptych.attention.collectives import sent_by

ATTENTION, LINEAR, OTHER, EXCHANGE = "attention", "linear", "other", "exchange"
KINDS = (ATTENTION, LINEAR, OTHER, EXCHANGE)
DETAILED_STEPS = 2
"""Steps whose every span is kept for drawing; of the others only sums and exchanges."""

_LINEAR = {"mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "linear"}
_ATTENTION = ("attention", "flash", "fa3")


@dataclass
class Exchange:
    """One collective: when this rank issued it, and from when to when it stood still for it. Seconds, host clock."""

    group: str
    name: str
    sent: int
    issued: float
    start: float = 0.0
    end: float = 0.0


@dataclass
class StepTrace:
    """One step: `sums` are seconds by kind; `spans` (kind, start, end) are kept for the first steps only."""

    start: float
    end: float = 0.0
    sums: dict[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 0.0))
    spans: list[tuple[str, float, float]] = field(default_factory=list)
    exchanges: list[Exchange] = field(default_factory=list)


@dataclass
class RankTrace:
    """All that one rank saw of one clip. gpu: samples (second, utilisation in percent, bytes used), if there is one."""

    rank: int
    device: str
    blocks: int
    steps: list[StepTrace] = field(default_factory=list)
    bytes_in_blocks: int = 0
    forwards: int = 0
    gpu: list[tuple[float, int, int]] = field(default_factory=list)


class Tracer(TorchDispatchMode):
    """Traces what runs, uncompiled, inside `with tracer:`; `step()` closes a step."""

    def __init__(self, rank: int, device: torch.device, blocks: Sequence[nn.Module]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = RankTrace(rank, str(device), len(blocks))
        self._clock: _HostClock | _StreamClock = _StreamClock(device) if device.type == "cuda" else _HostClock()
        self._blocks, self._in_block = blocks, False
        self._hooks: list[Any] = []
        self._open: dict[int, Exchange] = {}
        self._sampler = _Sampler(device, self.trace.gpu)

    def __enter__(self) -> Self:
        for block in self._blocks:
            self._hooks += [block.register_forward_pre_hook(self._enter), block.register_forward_hook(self._leave)]
        self._sampler.start()
        self._clock.begin()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        super().__exit__(kind, error, at)  # type: ignore[no-untyped-call]
        for hook in self._hooks:
            hook.remove()
        self._sampler.stop()

    def step(self) -> None:
        """End a step: all of its work is done. Called between steps, where the stream is idle."""
        spans, start, end = self._clock.take()
        step = StepTrace(start, end)
        for kind, a, b, exchange in spans:
            step.sums[kind] += b - a
            if isinstance(exchange, Exchange):
                exchange.start, exchange.end = a, b
                step.exchanges.append(exchange)
        if len(self.trace.steps) < DETAILED_STEPS:
            step.spans = [(kind, a, b) for kind, a, b, _ in spans]
        self.trace.steps.append(step)

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        self._in_block = True
        if module is self._blocks[0]:
            self.trace.forwards += 1

    def _leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        self._in_block = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().split("::")[1].split(".")[0]
        if func.namespace == "_c10d_functional":
            return self._exchange(name, func, args, kwargs or {})
        if func.namespace == "c10d":  # a decision on the control group: not a part of the computation
            return func(*args, **(kwargs or {}))
        kind = OTHER
        if name in _LINEAR:
            kind = LINEAR
        elif any(word in name for word in _ATTENTION) or func.namespace == "diptych_attention":
            kind = ATTENTION
        self._clock.enter(kind, None)
        result = func(*args, **(kwargs or {}))
        self._clock.leave()
        return result

    def _exchange(self, name: str, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if name == "wait_tensor":
            self._clock.enter(EXCHANGE, self._open.pop(id(args[0]), None))
            result = func(*args, **kwargs)
            self._clock.leave()
            return result
        sent = sent_by(name, args).bytes
        if self._in_block:
            self.trace.bytes_in_blocks += sent
        exchange = Exchange(args[-1], name, sent, time.monotonic())
        self._clock.enter(OTHER, None)
        result = func(*args, **kwargs)
        self._clock.leave()
        self._open[id(result)] = exchange
        return result


Span = tuple[str, float, float, Exchange | None]


class _HostClock:
    """Operators that are over when they return."""

    def begin(self) -> None:
        self._spans: list[Span] = []
        self._start = time.monotonic()

    def enter(self, kind: str, exchange: Exchange | None) -> None:
        self._now = (kind, time.monotonic(), exchange)

    def leave(self) -> None:
        kind, start, exchange = self._now
        end = time.monotonic()
        if self._spans and exchange is None and self._spans[-1][0] == kind and self._spans[-1][3] is None:
            start = self._spans.pop()[1]
        self._spans.append((kind, start, end, exchange))

    def take(self) -> tuple[list[Span], float, float]:
        spans, start, end = self._spans, self._start, time.monotonic()
        self.begin()
        return spans, start, end


class _StreamClock:
    """Operators queued on a stream: an event wherever the kind changes, read when the step is over."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self) -> None:
        torch.cuda.synchronize(self._device)
        self._zero = self._event()
        torch.cuda.synchronize(self._device)
        self._anchor = time.monotonic()
        self._marks: list[tuple[str, torch.cuda.Event, Exchange | None]] = []

    def enter(self, kind: str, exchange: Exchange | None) -> None:
        if self._marks and exchange is None and self._marks[-1][0] == kind and self._marks[-1][2] is None:
            return
        self._marks.append((kind, self._event(), exchange))

    def leave(self) -> None:
        pass

    def take(self) -> tuple[list[Span], float, float]:
        last = self._event()
        torch.cuda.synchronize(self._device)
        ends = [event for _, event, _ in self._marks[1:]] + [last]
        spans = [
            (kind, self._second(event), self._second(end), exchange)
            for (kind, event, exchange), end in zip(self._marks, ends, strict=True)
        ]
        start, end = self._anchor, self._second(last)
        self.begin()
        return spans, start, end

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _second(self, event: torch.cuda.Event) -> float:
        return self._anchor + float(self._zero.elapsed_time(event)) / 1000


class _Sampler:
    """Reads a GPU's utilisation and memory through NVML five times a second, where pynvml is installed."""

    def __init__(self, device: torch.device, out: list[tuple[float, int, int]]) -> None:
        self._device, self._out, self._over = device, out, threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._device.type != "cuda":
            return
        try:
            import pynvml
        except ImportError:
            return
        pynvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")

        def sample() -> None:
            while not self._over.wait(0.2):
                rates, memory = pynvml.nvmlDeviceGetUtilizationRates(handle), pynvml.nvmlDeviceGetMemoryInfo(handle)
                self._out.append((time.monotonic(), int(rates.gpu), int(memory.used)))

        self._thread = threading.Thread(target=sample, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        if self._thread is not None:
            self._thread.join()
