"""The two numbers of one forward, operations and bytes, and the floor they give at rates measured on this machine."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from diptych.attention import exponents
from diptych.attention.kernels import KERNELS, need_of
from diptych.bench.geometry import TEXT_TOKENS, Geometry
from diptych.bench.timing import in_turns, median
from diptych.model.config import TransformerConfig
from diptych.planner.work import Work
from diptych.planner.work import work as count

LEAST_SECONDS = 4.0
"""Of timing ceilings in turns on a GPU: a chip that was idle is faster for the first second or two."""


def work(config: TransformerConfig, geometry: Geometry, text: int, itemsize: int = 2) -> Work:
    """Operations and bytes of one forward with sound, batch 1."""
    return count(config, geometry.tokens, geometry.audio_tokens, text, itemsize)


@dataclass(frozen=True)
class Ceilings:
    """Rates of one device: operations a second of each large product and of the large attention; bytes a second.

    All as `in_turns` has them; attention_alone: of that attention with nothing beside it.
    """

    linears: dict[tuple[int, int, int], float]
    attention: float
    attention_alone: float
    attention_kernel: str
    copy: float

    def floor(self, work: Work, config: TransformerConfig, tokens: int) -> dict[str, float]:
        """Seconds of each part at these rates: products, video self-attention, and what costs its bytes."""
        linear = sum(2 * M * N * K * n / self.linears[M, N, K] for (M, N, K), n in work.linears.items())
        large = (tokens, tokens, config.heads, config.head_dim)
        attention = 4 * tokens * tokens * config.model_dim * work.attentions[large] / self.attention
        small = 0.0
        for (Q, S, H, K), n in work.attentions.items():
            if large != (Q, S, H, K):
                moved = 2 * 2 * (Q + S) * H * K
                small += n * max(moved / self.copy, 4 * Q * S * H * K / self.attention)
        parts = {
            "linear": linear,
            "video self-attention": attention,
            "other attention": small,
            "element-wise": work.bytes / self.copy,
        }
        return parts | {"floor": sum(parts.values())}


def measure(
    config: TransformerConfig, geometry: Geometry, text: int, device: torch.device, dtype: torch.dtype
) -> Ceilings:
    """Time the ceilings on this very device: every product of the forward, its large attention, a copy.

    In turns, each as often as a block has it: what runs at the limit of power is slower in such company than alone, and
    a forward is nothing but such company.
    """
    todo = work(config, geometry, text)
    S, blocks = geometry.tokens, config.num_visual_blocks
    alone, kernel, attend = _attention(config, S, device, dtype)
    copy, moved = _copy(device, dtype)
    calls: dict[Hashable, tuple[Callable[[], object], int]] = {
        shape: (_linear(shape, device, dtype), max(1, round(n / blocks))) for shape, n in todo.linears.items()
    }
    calls["attention"] = attend, 1
    calls["copy"] = copy, max(1, round(todo.bytes / blocks / moved))
    seconds = in_turns(calls, device, LEAST_SECONDS if device.type == "cuda" else 0.0)
    rates = {(M, N, K): 2 * M * N * K / seconds[M, N, K] for M, N, K in todo.linears}
    operations = 4 * S * S * config.model_dim
    return Ceilings(rates, operations / seconds["attention"], operations / alone, kernel, moved / seconds["copy"])


def _linear(shape: tuple[int, int, int], device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    M, N, K = shape
    x = torch.randn(M, K, device=device, dtype=dtype)
    w = torch.randn(N, K, device=device, dtype=dtype) / K**0.5
    return lambda: F.linear(x, w)


def _attention(
    config: TransformerConfig, S: int, device: torch.device, dtype: torch.dtype
) -> tuple[float, str, Callable[[], object]]:
    """Seconds alone, name and call of the best kernel there is, whichever `"auto"` takes: the ceiling is the machine's
    and not our choice."""
    shape = (1, S, config.heads, config.head_dim)
    q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
    q, k = (x * torch.rsqrt(x.float().square().mean(-1, keepdim=True)).to(dtype) for x in (q, k))
    q *= exponents.factor(config.head_dim)  # as the model's are, so that no kernel is left out
    limit = exponents.ROUNDED * config.head_dim * exponents.factor(config.head_dim)
    need = need_of(q, k, None, lse=False, bound=limit)
    calls = {
        kernel.name: lambda kernel=kernel: kernel(q, k, v, bound=limit)
        for kernel in KERNELS
        if kernel.exact and kernel.refusal(need) is None and kernel.name not in ("sdpa-math", "sdpa-efficient")
    }
    times = {name: median(call, device, repeats=3, warmup=1) for name, call in calls.items()}
    best = min(times, key=times.__getitem__)
    return times[best], best, calls[best]


def _copy(device: torch.device, dtype: torch.dtype) -> tuple[Callable[[], object], int]:
    """A copy far larger than any cache on a GPU, and the bytes it moves, read plus written."""
    values = (1 << 30) if device.type == "cuda" else (1 << 22)
    source = torch.randn(values, device=device, dtype=torch.float32).to(dtype)
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * source.nbytes


def copy_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Bytes a second, read plus written, of a large copy."""
    copy, moved = _copy(device, dtype)
    return moved / median(copy, device)


def host_rate(device: torch.device) -> float:
    """Bytes a second from page-locked host memory to the device."""
    values = (1 << 28) if device.type == "cuda" else (1 << 22)
    source = torch.empty(values, dtype=torch.uint8, pin_memory=device.type == "cuda")
    target = torch.empty_like(source, device=device)
    return source.nbytes / median(lambda: target.copy_(source, non_blocking=True), device)


def rates(
    geometry: Geometry, device: torch.device, dtype: torch.dtype, models: dict[str, TransformerConfig]
) -> dict[str, Any]:
    """What `diptych plan --rates` reads: TFLOP/s of all products of a forward together and of video self-attention by
    head size, TB/s of a copy, GB/s from the host. The first of `models` is the one whose products count.
    """
    first = next(iter(models.values()))
    todo = work(first, geometry, TEXT_TOKENS)
    seconds = sum(median(_linear(shape, device, dtype), device) * n for shape, n in todo.linears.items())
    attention, kernels = {}, {}
    for config in models.values():
        alone, kernel, _ = _attention(config, geometry.tokens, device, dtype)
        attention[str(config.head_dim)] = 4 * geometry.tokens**2 * config.model_dim / alone / 1e12
        kernels[str(config.head_dim)] = kernel
    return {
        "geometry": str(geometry),
        "dtype": str(dtype).removeprefix("torch."),
        "linear_tflops": todo.linear_operations / seconds / 1e12,
        "attention_tflops": attention,
        "attention_kernels": kernels,
        "copy_TBps": copy_rate(device, dtype) / 1e12,
        "host_GBps": host_rate(device) / 1e9,
    }


def as_json(ceilings: Ceilings) -> dict[str, Any]:
    """Rates with shapes spelt out, TFLOP/s and TB/s."""
    return {
        "linear_tflops": {f"{M}x{K}->{N}": rate / 1e12 for (M, N, K), rate in ceilings.linears.items()},
        "attention_tflops": ceilings.attention / 1e12,
        "attention_alone_tflops": ceilings.attention_alone / 1e12,
        "attention_kernel": ceilings.attention_kernel,
        "copy_TBps": ceilings.copy / 1e12,
    }
