"""Sections about single kernels: right, how fast, and with which tiles."""

# ruff: noqa: B023 - every call is made before its loop goes on
from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import torch

from diptych.attention import exponents, merge_kernel
from diptych.attention import kernels as attention_kernels
from diptych.attention import merge as merging
from diptych.attention.queries import Queries
from diptych.bench.forward import relative
from diptych.model import ops, plain
from diptych.model.rope import rope_1d
from diptych.planner.cost import merging as planned_merging
from h200_common import DEVICE, HALF, SIZE, TEXT, TINY, ms, ms_many, randn, wait


def fused() -> dict[str, Any]:
    """Element-wise kernels: correct, and which tile is fastest."""
    from diptych.model.kernels import adaln, quantise, rotate

    out: dict[str, Any] = {}
    S = SIZE.tokens
    for D, H, K in ((80, 5, 16),) if TINY else ((4096, 32, 128), (1792, 28, 64)):
        x, y = randn(1, S, D), randn(1, S, D)
        gate, shift, scale = randn(1, 9 * D, dtype=torch.float32).chunk(9, dim=-1)[:3]
        q, k, w = x.view(1, S, H, K), y.view(1, S, H, K), randn(K)
        rope = rope_1d(S, K, DEVICE)
        want = plain.gated_scale_shift(x, y, gate, shift, scale)
        got = adaln.gated_scale_shift(x, y, gate, shift, scale)
        out[f"error adaln {D}"] = [relative(g, r) for g, r in zip(got, want, strict=True)]
        out[f"error rotate {D}"] = relative(rotate.norm_rotate(q, w, rope), plain.norm_rotate(q, w, rope))
        del want, got
        passes = S * D * 2
        adaln_calls = {
            "gated, normed": (lambda: adaln.gated_scale_shift(x, y, gate, shift, scale), 4),
            "normed": (lambda: adaln.scale_shift(x, shift, scale), 2),
        }
        for what, (call, moved) in adaln_calls.items():
            spent = ms(call)
            out[f"adaln {D} {what}, as it is tuned"] = [spent, moved * passes / spent / 1e9]
        spent = ms(lambda: rotate.norm_rotate_pair(q, k, w, w, rope))
        out[f"rotate {D}, as it is tuned"] = [spent, (4 * passes + 2 * S * K * 2) / spent / 1e9]
        for rows, steps, warps in ((2, 2, 4),) if TINY else product((1, 2, 4), (1, 2, 4), (4, 8)):
            tune = {"ROWS": rows, "STEPS": steps, "num_warps": warps}
            with patch.object(adaln, "tuning", lambda S, D, gated, normed: tune):
                for what, (call, moved) in adaln_calls.items():
                    spent = ms(call)
                    label = f"adaln {D} {what}, rows {rows} steps {steps} warps {warps}"
                    out[label] = [spent, moved * passes / spent / 1e9]
        for rows, warps in ((2, 4),) if TINY else product((1, 2, 4), (2, 4, 8)):
            tune = {"ROWS": rows, "num_warps": warps}
            with patch.object(rotate, "tuning", lambda S, width: tune):
                spent = ms(lambda: rotate.norm_rotate_pair(q, k, w, w, rope))
            out[f"rotate {D} rows {rows} warps {warps}"] = [spent, (4 * passes + 2 * S * K * 2) / spent / 1e9]
        hidden = randn(1, S, 4 * D)
        out[f"gelu {D}"] = ms(lambda: torch.nn.functional.gelu(hidden))
        out[f"gelu in place {D}"] = ms(lambda: torch.ops.aten.gelu_(hidden))
        out[f"gelu in place by Triton {D}"] = ms(lambda: quantise.gelu_(hidden)) if DEVICE.type == "cuda" else None
    return out


def merge() -> dict[str, Any]:
    """Joining the partial results of a ring: plain torch against the kernel, and which tile is fastest.

    Of each: milliseconds, and TB/s of the bytes that it has to move: for the kernel those that `planner.cost.merging`
    counts; plain torch scales a sum, makes a part float32, scales and adds it, 34 bytes, and 20 at both ends.
    """
    out: dict[str, Any] = {}
    for ranks in (8, 2):
        S, H, K = -(-SIZE.tokens // ranks), *((5, 16) if TINY else (32, 128))
        parts = [  # a log-sum-exp as FlashAttention-3 returns it
            (randn(1, S, H, K), randn(1, H, S, dtype=torch.float32).transpose(1, 2)) for _ in range(ranks)
        ]
        numbers = S * H * K
        counted = planned_merging(ranks, 2)
        exact, exact_lse = merging.merge([(o[:, :512].double(), x[:, :512].double()) for o, x in parts], torch.float64)
        call = partial(merging.merge, parts, HALF)
        for how, can, moved in (("plain", False, 20 + 34 * (ranks - 1)), ("kernel", True, counted)):
            with patch.object(merging, "fusible", return_value=can):
                got, lse = call()
                spent = ms(call)
                off = relative(got[:, :512], exact), float((lse[:, :512] - exact_lse).abs().max())
                out[f"ring={ranks} {how}"] = {"ms": spent, "TB/s": moved * numbers / spent / 1e9, "error": off}
                if DEVICE.type == "cuda":
                    out[f"ring={ranks} {how}"]["bytes above the parts, a number"] = peak_bytes(call) / numbers
            del got, lse
        for rows, warps in ((256, 4),) if TINY else product((8, 16, 32, 64), (2, 4, 8)):
            if rows * K < 256 * warps:
                continue
            tune = {"ROWS": rows, "num_warps": warps}
            with (
                patch.object(merging, "fusible", return_value=True),
                patch.object(merge_kernel, "tuning", return_value=tune),
            ):
                spent = ms(call)
            out[f"ring={ranks} kernel, rows {rows} warps {warps}"] = [spent, counted * numbers / spent / 1e9]
    return out


def peak_bytes(call: Callable[[], object]) -> int:
    """Of what `call` allocates on the GPU, the most at once."""
    wait()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return torch.cuda.max_memory_allocated() - before


def cross() -> dict[str, Any]:
    """Attentions with one short side, by every kernel."""
    out: dict[str, Any] = {}
    S, A = SIZE.tokens, SIZE.audio_tokens
    for name, H, K, Q, N in (
        ("text", 32, 128, S, TEXT),
        ("video from audio", 32, 128, S, A),
        ("audio from video", 16, 128, A, S),
        ("audio self", 16, 128, A, A),
        ("lite text", 28, 64, S, TEXT),
        ("lite audio from video", 14, 64, A, S),
    ):
        q, k, v = randn(1, Q, H, K), randn(1, N, H, K), randn(1, N, H, K)
        need = attention_kernels.need_of(q, k, None, lse=False)
        for kernel in attention_kernels.KERNELS:
            if kernel.refusal(need) is None and kernel.name not in ("sdpa-math", "sdpa-efficient"):
                out[f"{name}: {kernel.name}"] = ms(lambda kernel=kernel, q=q, k=k, v=v: kernel(q, k, v))
        from diptych.attention import cores

        if cores._fa3_func is not None:
            reference = attention_kernels.pick("sdpa-flash", need)(q, k, v)
            for splits in (0, 2, 4, 8, 16) if Q < 1000 else (0,):
                run = lambda splits=splits, q=q, k=k, v=v: cores._fa3_func(q, k, v, num_splits=splits)  # noqa: E731
                error = relative(run(), reference)
                out[f"{name}: fa3 splits {splits}"] = [ms(run), error]
            padded = [torch.nn.functional.pad(x, (0, 0, 0, 0, 0, -x.shape[1] % 128)) for x in (k, v)]
            out[f"{name}: fa3 keys to 128"] = ms(lambda q=q, p=padded: cores._fa3_func(q, *p))
    return out


def short() -> dict[str, Any]:
    """Few keys: every kernel that can, and what the one that holds them does in the same pass."""
    out: dict[str, Any] = {}
    S = SIZE.tokens
    for H, K, N in ((5, 16, TEXT),) if TINY else ((32, 128, TEXT), (32, 128, SIZE.audio_tokens), (28, 64, TEXT)):
        raw, v = randn(1, S, H, K), randn(1, N, H, K)
        weight = (1 + 0.2 * randn(K)).to(HALF)
        factor, bound = exponents.factor(K), 60.0
        q, k = (ops.norm_rotate(x, weight, None, scale=s) for x, s in ((raw, factor), (randn(1, N, H, K), 1.0)))
        some = slice(S // 2, S // 2 + 256)
        scores = torch.einsum("qhk,shk->hqs", q[0, some].double(), k[0].double()) / exponents.LOG2_E
        exact = torch.einsum("hqs,shk->qhk", scores.softmax(-1), v[0].double())
        name = f"{N} keys, {H} heads of {K}"
        scale = ops.common_scale(v)
        unfinished = Queries(raw, weight, factor, ops.RMS_NORM_EPS, lambda raw=raw, w=weight, f=factor: made(raw, w, f))

        def told(call: Callable[[], torch.Tensor], unit: Any = 1.0) -> dict[str, float]:
            return {"ms": ms_many(call), "error": relative(call()[0, some].float() * unit, exact)}

        need = attention_kernels.need_of(q, k, None, lse=False, bound=bound)
        for kernel in attention_kernels.KERNELS:
            if kernel.refusal(need) is None and kernel.exact and kernel.name not in ("sdpa-math", "sdpa-efficient"):
                out[f"{name}: {kernel.name}"] = told(lambda kernel=kernel: kernel(q, k, v, bound=bound))
        if DEVICE.type == "cuda" and attention_kernels.fuses(need):
            kernel = attention_kernels.pick("auto", need)
            fp8 = unfinished._replace(fp8_scale=scale)
            out[f"{name}: {kernel.name}, normalising"] = told(lambda: kernel(unfinished, k, v, bound=bound))
            out[f"{name}: {kernel.name}, in e4m3"] = told(
                lambda: kernel(Queries(q, fp8_scale=scale), k, v, bound=bound), scale
            )
            out[f"{name}: {kernel.name}, both"] = told(lambda: kernel(fp8, k, v, bound=bound), scale)
        flat = q.flatten(2)
        out[f"{name}: normalising alone"] = {"ms": ms_many(lambda: made(raw, weight, factor))}
        out[f"{name}: quantising alone"] = {"ms": ms_many(lambda: ops.to_rows(flat))}
    return out


def made(raw: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    return ops.norm_rotate(raw, weight, None, scale=scale)


def fp8_parts() -> dict[str, Any]:
    """The parts of fp8: what each costs, and how far it is off."""
    from diptych.attention import APPROXIMATE, LocalAttend, Role, exponents, int8
    from diptych.model.fp8 import Fp8Linear
    from diptych.model.kernels import quantise

    out: dict[str, Any] = {}
    S = SIZE.tokens
    hidden = randn(1, S, 128 if TINY else 16384)
    out["gelu aten"] = ms(lambda: torch.nn.functional.gelu(hidden))
    out["gelu triton in place"] = ms(lambda: quantise.gelu_(hidden))
    out["gelu and rows"] = ms(lambda: quantise.to_rows(hidden, gelu=True))
    for N, K in ((80, 128),) if TINY else ((4096, 4096), (16384, 4096), (4096, 16384), (2048, 4096), (1792, 1792)):
        x, linear = randn(1, S, K), torch.nn.Linear(K, N, device=DEVICE, dtype=HALF)
        layer = Fp8Linear.quantised(linear)
        rows = quantise.to_rows(x)
        spent = ms(lambda: layer(rows))
        exact = torch.nn.functional.linear(x[:, :2048].float(), linear.weight.float(), linear.bias.float())
        out[f"fp8 linear {K}->{N}"] = {
            "TFLOP/s": 2 * S * N * K / spent / 1e9,
            "rows ms": ms(lambda: quantise.to_rows(x)),
            "error": relative(layer(x)[:, :2048], exact),
            "bf16 error": relative(linear(x)[:, :2048], exact),
        }
    H, K = (5, 16) if TINY else (32, 128)
    q, k, v = randn(1, S, H, K), randn(1, S, H, K), randn(1, S, H, K)
    rope = rope_1d(S, K, DEVICE)
    q = plain.norm_rotate(q, torch.ones(K, device=DEVICE), rope, exponents.factor(K))
    k = plain.norm_rotate(k, torch.ones(K, device=DEVICE), rope)
    bound = exponents.ROUNDED * K * exponents.factor(K)
    out["int8: one tensor"] = ms(lambda: int8.rounded(k))
    exact, fewer = LocalAttend(), LocalAttend(APPROXIMATE)
    for name, attend in (("exact", exact), ("int8", fewer)):
        out[f"{name} attention"] = ms(lambda: attend(Role.VISUAL_SELF, q, k, v, bound=bound), 5)
    want, lse = exact.with_lse(Role.VISUAL_SELF, q, k, v, bound=bound)
    got, got_lse = fewer.with_lse(Role.VISUAL_SELF, q, k, v, bound=bound)
    out["int8: error"] = relative(got, want)
    out["int8: log-sum-exp off by"] = float((got_lse - lse).abs().max())
    offset = torch.randn(K, device=DEVICE).to(HALF) * 2  # an offset that all keys share, which smoothing would take off
    want = exact(Role.VISUAL_SELF, q, k + offset, v, bound=3 * bound)
    out["int8: error with an offset of keys"] = relative(
        fewer(Role.VISUAL_SELF, q, k + offset, v, bound=3 * bound), want
    )
    return out


def new_text_length() -> dict[str, Any]:
    """What cuDNN takes to plan an attention it has not seen: a prompt of another length."""
    out = {}
    for L in (201, 317):
        q, k = randn(1, SIZE.tokens, 32, 128), randn(1, L, 32, 128)
        need = attention_kernels.need_of(q, k, None, lse=False)
        kernel = attention_kernels.pick("auto", need)
        for turn in ("first", "second"):
            wait()
            start = time.perf_counter()
            kernel(q, k, k)
            wait()
            out[f"{L} keys, {turn}, {kernel.name}"] = time.perf_counter() - start
    return out
