"""Sections about video self-attention: the kernel without a maximum beside others, and what clock and power allow."""

# ruff: noqa: B023 - every call is made before its loop goes on
from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import torch

from diptych.attention import exponents
from diptych.attention import kernels as attention_kernels
from diptych.bench.forward import relative
from diptych.bench.timing import once
from h200_common import DEVICE, SIZE, TINY, ms, randn

TILES = {64: ((128, 3), (128, 4), (128, 6), (64, 4)), 128: ((64, 2), (64, 3), (64, 4))}


def normalised(S: int, H: int, K: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries and keys as a block makes them, the queries with their factor, and values."""
    q, k, v = randn(1, S, H, K), randn(1, S, H, K), randn(1, S, H, K)
    q, k = (x * torch.rsqrt(x.float().square().mean(-1, keepdim=True)).to(x.dtype) for x in (q, k))
    return q * exponents.factor(K), k, v


def bounded() -> dict[str, Any]:
    """Milliseconds, TFLOP/s and the error of 256 queries of one head, at the sizes of Pro and Lite."""
    out: dict[str, Any] = {}
    S = SIZE.tokens
    for H, K in ((5, 16),) if TINY else ((32, 128), (28, 64)):
        q, k, v = normalised(S, H, K)
        bound = exponents.ROUNDED * K * exponents.factor(K)
        need = attention_kernels.need_of(q, k, None, lse=False, bound=bound)
        rows = slice(S // 2, S // 2 + 256)
        scores = torch.einsum("qk,sk->qs", q[0, rows, 0].double(), k[0, :, 0].double()) / exponents.LOG2_E
        exact = scores.softmax(-1) @ v[0, :, 0].double()

        def told(kernel: attention_kernels.Kernel) -> dict[str, float]:
            spent = ms(lambda: kernel(q, k, v, bound=bound), 5)
            error = relative(kernel(q, k, v, bound=bound)[0, rows, 0], exact)
            return {"ms": spent, "TFLOP/s": 4 * S * S * H * K / spent / 1e9, "error": error}

        found = [kernel for kernel in attention_kernels.KERNELS if kernel.refusal(need) is None]
        for kernel in found:
            if kernel.name not in ("sdpa-math", "sdpa-efficient", "sdpa-flash") or TINY:
                out[f"{H} heads of {K}: {kernel.name}"] = told(kernel)
        if DEVICE.type == "cuda" and found[0].name == "bounded":
            from diptych.attention import bounded_kernel

            for keys, stages in TILES[K]:
                with patch.dict(bounded_kernel.TILES, {K: bounded_kernel.Tile(keys, stages)}):
                    out[f"{H} heads of {K}: {keys} keys, {stages} stages"] = told(found[0])
    return out


def power(seconds: float = 2.5) -> dict[str, Any]:
    """Each call repeated: milliseconds, and the means of clock and power in the later half. Needs pynvml."""
    if DEVICE.type != "cuda":
        return {"left out": "clock and power are read from an NVIDIA GPU"}
    from diptych.attention import bounded_kernel, cores, int8

    S = SIZE.tokens
    q, k, v = normalised(S, 32, 128)
    whole_q, whole_k = int8.rounded(q), int8.rounded(k)
    narrow = normalised(S, 28, 64)
    x, w = randn(S, 4096), randn(16384, 4096)
    calls: dict[str, Callable[[], object]] = {
        "32 heads of 128, int8": lambda: bounded_kernel.attention_int8(whole_q, whole_k, v, False),
        "32 heads of 128": lambda: bounded_kernel.attention(q, k, v, False),
        "28 heads of 64": lambda: bounded_kernel.attention(*narrow, False),
        "product of 4096 to 16384": lambda: x @ w.T,
    }
    if cores._fa3_func is not None:
        calls["32 heads of 128, FlashAttention-3"] = lambda: cores._fa3_func(q, k, v)
    return {name: _watched(call, seconds) for name, call in calls.items()}


def _watched(call: Callable[[], object], seconds: float) -> dict[str, float]:
    seen: list[tuple[int, int]] = []
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.05):
            seen.append((torch.cuda.clock_rate(), torch.cuda.power_draw()))

    once(call, DEVICE)  # compiles
    watcher = threading.Thread(target=watch)
    watcher.start()
    took, begun = [], time.perf_counter()
    while time.perf_counter() - begun < seconds:
        took.append(once(call, DEVICE) * 1e3)
    over.set()
    watcher.join()
    clock, milliwatts = (statistics.fmean(part) for part in zip(*seen[len(seen) // 2 :], strict=True))
    return {"ms": statistics.median(took), "MHz": clock, "W": milliwatts / 1e3}
