"""A training step's norms, shifts, gates, rotary turns and bias gradients: one pass forward, one backward (Triton).

Sums over tokens and rows are taken in parts, a program each, which torch adds up: the same bits every time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

NORM_EPS = tl.constexpr(1e-5)
"""Of `F.layer_norm`."""
HEAD_EPS = tl.constexpr(1.1920929e-07)
"""Of `F.rms_norm` in float32."""
TOKENS, STEP = 32, 8
"""Tokens of one program, and how many of them at a time."""
HEADS_AT_ONCE = 128
ROWS = 1024


@triton.jit
def _head(x_ptr, at, mask, K: tl.constexpr):
    """Even and odd channels of heads, and their inverse root mean square."""
    even = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(x_ptr + at + 1, mask=mask, other=0.0).to(tl.float32)
    return even, odd, tl.rsqrt((tl.sum(even * even, 1) + tl.sum(odd * odd, 1)) / K + HEAD_EPS)[:, None]


@triton.jit
def _turn(x_ptr, w_ptr, cos_ptr, sin_ptr, out_ptr, count, S, H, K: tl.constexpr, TURN: tl.constexpr, R: tl.constexpr):
    row = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]
    pair = tl.arange(0, K // 2)[None, :]
    mask = row < count
    even, odd, inverse = _head(x_ptr, row * K + 2 * pair, mask, K)
    even = even * inverse * tl.load(w_ptr + 2 * pair)
    odd = odd * inverse * tl.load(w_ptr + 2 * pair + 1)
    if TURN:
        place = (row // H % S) * (K // 2) + pair
        cos, sin = tl.load(cos_ptr + place), tl.load(sin_ptr + place)
        even, odd = even * cos - odd * sin, even * sin + odd * cos
    out = out_ptr + row * K + 2 * pair
    tl.store(out, even.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(out + 1, odd.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _turn_back(
    x_ptr, w_ptr, cos_ptr, sin_ptr, g_ptr, dx_ptr, dw_ptr, count, gB, gS, gH, S, H,
    K: tl.constexpr, TURN: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0).to(tl.int64) * R + tl.arange(0, R))[:, None]
    pair = tl.arange(0, K // 2)[None, :]
    mask = row < count
    token = row // H
    x, y, inverse = _head(x_ptr, row * K + 2 * pair, mask, K)
    g = g_ptr + token // S * gB + token % S * gS + row % H * gH + 2 * pair
    even = tl.load(g, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(g + 1, mask=mask, other=0.0).to(tl.float32)
    if TURN:
        place = (token % S) * (K // 2) + pair
        cos, sin = tl.load(cos_ptr + place), tl.load(sin_ptr + place)
        even, odd = even * cos + odd * sin, odd * cos - even * sin
    part = dw_ptr + tl.program_id(0) * K + 2 * tl.arange(0, K // 2)
    tl.store(part, tl.sum(even * x * inverse, 0))
    tl.store(part + 1, tl.sum(odd * y * inverse, 0))
    even, odd = even * tl.load(w_ptr + 2 * pair), odd * tl.load(w_ptr + 2 * pair + 1)
    along = ((tl.sum(even * x, 1) + tl.sum(odd * y, 1)) / K)[:, None] * inverse * inverse
    dx = dx_ptr + row * K + 2 * pair
    tl.store(dx, (inverse * (even - x * along)).to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dx + 1, (inverse * (odd - y * along)).to(dx_ptr.dtype.element_ty), mask=mask)


class _Turn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSHK: Tensor, weight: Tensor, cos: Tensor | None, sin: Tensor | None) -> Tensor:
        B, S, H, K = x_BSHK.shape
        x = x_BSHK.contiguous()
        out, count = torch.empty_like(x), B * S * H
        grid = (triton.cdiv(count, HEADS_AT_ONCE),)
        _turn[grid](x, weight, cos, sin, out, count, S, H, K, cos is not None, HEADS_AT_ONCE)
        ctx.save_for_backward(x, weight, cos, sin)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None, None]:
        x, weight, cos, sin = ctx.saved_tensors
        B, S, H, K = x.shape
        if g.stride(3) != 1:
            g = g.contiguous()
        dx, programs = torch.empty_like(x), triton.cdiv(B * S * H, HEADS_AT_ONCE)
        dw = torch.empty(programs, K, device=x.device)
        _turn_back[(programs,)](
            x, weight, cos, sin, g, dx, dw, B * S * H, g.stride(0), g.stride(1), g.stride(2), S, H,
            K, cos is not None, HEADS_AT_ONCE,
        )  # fmt: skip
        return dx, dw.sum(0), None, None


def norm_turn(x_BSHK: Tensor, weight_K: Tensor, rope: tuple[Tensor, Tensor] | None) -> Tensor:
    """RMS norm over each head, then the rotary turn by (cos, sin), each (S, K / 2) float32, if any; in x's dtype."""
    out: Tensor = _Turn.apply(x_BSHK, weight_K, *(rope or (None, None)))
    return out


@triton.jit
def _normed(x_ptr, at, mask, D: tl.constexpr):
    """Rows less their mean over their deviation, and one over the deviation."""
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    x = tl.where(mask, x - (tl.sum(x, 1) / D)[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / D + NORM_EPS)[:, None]
    return x * inverse, inverse


@triton.jit
def _scale(x_ptr, shift_ptr, scale_ptr, out_ptr, shift_stride, scale_stride, S, D: tl.constexpr, BLOCK: tl.constexpr,
           TOKENS: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BLOCK)[None, :]
    wide = channel < D
    shift = tl.load(shift_ptr + b * shift_stride + channel, mask=wide, other=0.0)
    scale = tl.load(scale_ptr + b * scale_stride + channel, mask=wide, other=0.0) + 1
    for first in range(0, TOKENS, STEP):
        token = (tl.program_id(0) * TOKENS + first + tl.arange(0, STEP))[:, None]
        mask = (token < S) & wide
        at = (b * S + token) * D + channel
        x, _ = _normed(x_ptr, at, mask, D)
        tl.store(out_ptr + at, (x * scale + shift).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _scale_back(x_ptr, scale_ptr, g_ptr, dx_ptr, dshift_ptr, dscale_ptr, scale_stride, S, D: tl.constexpr,
                BLOCK: tl.constexpr, TOKENS: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BLOCK)[None, :]
    wide = channel < D
    scale = tl.load(scale_ptr + b * scale_stride + channel, mask=wide, other=0.0) + 1
    dshift = tl.zeros((STEP, BLOCK), tl.float32)
    dscale = tl.zeros((STEP, BLOCK), tl.float32)
    for first in range(0, TOKENS, STEP):
        token = (tl.program_id(0) * TOKENS + first + tl.arange(0, STEP))[:, None]
        mask = (token < S) & wide
        at = (b * S + token) * D + channel
        x, inverse = _normed(x_ptr, at, mask, D)
        g = tl.load(g_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dshift += g
        dscale += g * x
        g = g * scale
        g = g - (tl.sum(g, 1) / D)[:, None] - x * (tl.sum(g * x, 1) / D)[:, None]
        tl.store(dx_ptr + at, (g * inverse).to(dx_ptr.dtype.element_ty), mask=mask)
    part = (b * tl.num_programs(0) + tl.program_id(0)) * D + tl.arange(0, BLOCK)
    tl.store(dshift_ptr + part, tl.sum(dshift, 0), mask=tl.arange(0, BLOCK) < D)
    tl.store(dscale_ptr + part, tl.sum(dscale, 0), mask=tl.arange(0, BLOCK) < D)


def _sizes(x: Tensor) -> tuple[tuple[int, int], tuple[int, int, int, int]]:
    B, S, D = x.shape
    return (triton.cdiv(S, TOKENS), B), (D, triton.next_power_of_2(D), TOKENS, STEP)


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        x = x_BSD.contiguous()
        out, (grid, sizes) = torch.empty_like(x), _sizes(x)
        _scale[grid](x, shift, scale, out, shift.stride(0), scale.stride(0), x.shape[1], *sizes)
        ctx.save_for_backward(x, scale)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, scale = ctx.saved_tensors
        B, S, D = x.shape
        dx, (grid, sizes) = torch.empty_like(x), _sizes(x)
        dshift, dscale = (torch.empty(B, grid[0], D, device=x.device) for _ in range(2))
        _scale_back[grid](x, scale, g.contiguous(), dx, dshift, dscale, scale.stride(0), S, *sizes)
        return dx, dshift.sum(1, keepdim=True), dscale.sum(1, keepdim=True)


def scaled(x_BSD: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """Layer norm without weights, times (scale + 1), plus shift; both (B, 1, D) float32."""
    out: Tensor = _Scale.apply(x_BSD, shift, scale)
    return out


@triton.jit
def _gate_back(y_ptr, gate_ptr, g_ptr, dy_ptr, dgate_ptr, gate_stride, S, D: tl.constexpr, BLOCK: tl.constexpr,
               TOKENS: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    b = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BLOCK)[None, :]
    wide = channel < D
    gate = tl.load(gate_ptr + b * gate_stride + channel, mask=wide, other=0.0)
    dgate = tl.zeros((STEP, BLOCK), tl.float32)
    for first in range(0, TOKENS, STEP):
        token = (tl.program_id(0) * TOKENS + first + tl.arange(0, STEP))[:, None]
        mask = (token < S) & wide
        at = (b * S + token) * D + channel
        g = tl.load(g_ptr + at, mask=mask, other=0.0).to(tl.float32)
        dgate += g * tl.load(y_ptr + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dy_ptr + at, (g * gate).to(dy_ptr.dtype.element_ty), mask=mask)
    part = (b * tl.num_programs(0) + tl.program_id(0)) * D + tl.arange(0, BLOCK)
    tl.store(dgate_ptr + part, tl.sum(dgate, 0), mask=tl.arange(0, BLOCK) < D)


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, gate: Tensor) -> Tensor:
        ctx.save_for_backward(y.contiguous(), gate)
        return torch.addcmul(x, y, gate.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y, gate = ctx.saved_tensors
        B, S, D = y.shape
        g = g.contiguous()
        dy, (grid, sizes) = torch.empty_like(y), _sizes(y)
        dgate = torch.empty(B, grid[0], D, device=y.device)
        _gate_back[grid](y, gate, g, dy, dgate, gate.stride(0), S, *sizes)
        return g, dy, dgate.sum(1, keepdim=True)


def gated(x_BSD: Tensor, y_BSD: Tensor, gate: Tensor) -> Tensor:
    """x + gate * y; gate (B, 1, D) float32."""
    out: Tensor = _Gate.apply(x_BSD, y_BSD, gate)
    return out


@triton.jit
def _columns(g_ptr, part_ptr, N, D, ROWS: tl.constexpr, STEP: tl.constexpr, BLOCK: tl.constexpr):
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((STEP, BLOCK), tl.float32)
    for first in range(0, ROWS, STEP):
        row = (tl.program_id(0).to(tl.int64) * ROWS + first + tl.arange(0, STEP))[:, None]
        mask = (row < N) & (channel < D)[None, :]
        total += tl.load(g_ptr + row * D + channel[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(part_ptr + tl.program_id(0) * D + channel, tl.sum(total, 0), mask=channel < D)


def column_sums(g_ND: Tensor) -> Tensor:
    """(D,) in float32."""
    N, D = g_ND.shape
    parts = torch.empty(triton.cdiv(N, ROWS), D, device=g_ND.device)
    _columns[(len(parts), triton.cdiv(D, 64))](g_ND, parts, N, D, ROWS, 32, 64)
    return parts.sum(0)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        flat = g.reshape(-1, g.shape[-1])
        dx = g @ weight if ctx.needs_input_grad[0] else None
        return dx, flat.T @ x.reshape(-1, x.shape[-1]), column_sums(flat.contiguous()).to(weight.dtype)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`F.linear` whose bias gradient is summed in one pass."""
    if bias is None:
        return F.linear(x, weight)
    out: Tensor = _Linear.apply(x, weight, bias)
    return out


class _Cast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)  # a batch without sound leaves the sound's parameters without gradients
        out = [torch.empty_like(v, dtype=dtype) for v in values]
        torch._foreach_copy_(out, list(values))
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        told = [g for g in grads if g is not None]
        wide = [torch.empty_like(g, dtype=torch.float32) for g in told]
        torch._foreach_copy_(wide, told)
        rest = iter(wide)
        return None, *(None if g is None else next(rest) for g in grads)


def cast(values: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """All of them in `dtype`, in a few launches; gradients come back in float32 likewise."""
    return list(_Cast.apply(dtype, *values))
