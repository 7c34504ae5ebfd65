"""A section about video self-attention: the kernel without a maximum beside others, in turns, and its tiles."""

# ruff: noqa: B023 - every call is made before its loop goes on
from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from diptych.attention import exponents
from diptych.attention import kernels as attention_kernels
from diptych.bench.forward import relative
from h200_common import DEVICE, SIZE, TINY, ms, randn

TILES = {64: ((128, 3), (128, 4), (128, 6), (64, 4)), 128: ((64, 2), (64, 3), (64, 4))}


def bounded() -> dict[str, Any]:
    """Milliseconds, TFLOP/s and the error of 256 queries of one head, at the sizes of Pro and Lite."""
    out: dict[str, Any] = {}
    S = SIZE.tokens
    for H, K in ((5, 16),) if TINY else ((32, 128), (28, 64)):
        q, k, v = randn(1, S, H, K), randn(1, S, H, K), randn(1, S, H, K)
        q, k = (x * torch.rsqrt(x.float().square().mean(-1, keepdim=True)).to(x.dtype) for x in (q, k))
        q = q * exponents.factor(K)
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
