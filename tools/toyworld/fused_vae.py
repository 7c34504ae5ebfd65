"""What a training step of the video VAE does between its convolutions, in one pass each way (Triton).

`norm` is GroupNorm with SiLU over a whole clip; `taps` gathers what a causal convolution reads: each frame, the two
before it, and a border of repeated edges. Activations are (B, T, H, W, C), contiguous.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS, STEP, BLOCK = 2048, 64, 1024


@triton.jit
def _inner(x, scale, shift, SILU: tl.constexpr):
    """What goes into the activation, and its slope there."""
    u = x * scale + shift
    if SILU:
        s = tl.sigmoid(u)
        return u * s, s * (1 + u * (1 - s))
    return u, tl.full(u.shape, 1.0, tl.float32)


@triton.jit
def _sums(x_ptr, g_ptr, scale_ptr, shift_ptr, one_ptr, two_ptr, N, C: tl.constexpr, BLOCK: tl.constexpr,
          BACK: tl.constexpr, SILU: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """By channel, of a part of a clip: forward the sums of x and of its square, backward of du and of du x."""
    b = tl.program_id(1).to(tl.int64)
    channel = tl.arange(0, BLOCK)
    wide = channel < C
    one, two = tl.zeros((STEP, BLOCK), tl.float32), tl.zeros((STEP, BLOCK), tl.float32)
    if BACK:
        scale = tl.load(scale_ptr + b * C + channel, mask=wide, other=0.0)[None, :]
        shift = tl.load(shift_ptr + b * C + channel, mask=wide, other=0.0)[None, :]
    for first in range(0, ROWS, STEP):
        row = (tl.program_id(0) * ROWS + first + tl.arange(0, STEP))[:, None]
        mask = (row < N) & wide[None, :]
        at = (b * N + row) * C + channel[None, :]
        x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
        if BACK:
            _, slope = _inner(x, scale, shift, SILU)
            du = slope * tl.load(g_ptr + at, mask=mask, other=0.0).to(tl.float32)
            one += du
            two += du * x
        else:
            one += x
            two += x * x
    part = (b * tl.num_programs(0) + tl.program_id(0)) * C + channel
    tl.store(one_ptr + part, tl.sum(one, 0), mask=wide)
    tl.store(two_ptr + part, tl.sum(two, 0), mask=wide)


@triton.jit
def _apply(x_ptr, g_ptr, scale_ptr, shift_ptr, slope_ptr, rest_ptr, out_ptr, N, C: tl.constexpr, BACK: tl.constexpr,
           SILU: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Forward the activation; backward du scale + x slope + rest."""
    b = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = place < N * C
    at, channel = b * N * C + place, b * C + place % C
    x = tl.load(x_ptr + at, mask=mask, other=0.0).to(tl.float32)
    scale = tl.load(scale_ptr + channel, mask=mask, other=0.0)
    y, slope = _inner(x, scale, tl.load(shift_ptr + channel, mask=mask, other=0.0), SILU)
    if BACK:
        y = slope * tl.load(g_ptr + at, mask=mask, other=0.0).to(tl.float32) * scale
        y += x * tl.load(slope_ptr + channel, mask=mask, other=0.0) + tl.load(rest_ptr + channel, mask=mask, other=0.0)
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, groups: int, eps: float, silu: bool) -> Tensor:
        x = x.contiguous()
        B, C = x.shape[0], x.shape[-1]
        N = x[0].numel() // C
        one, two = _both(x, x, weight, weight, False, silu)
        mean, square = (by_group(s, groups) / N for s in (one, two))
        inverse = torch.rsqrt((square - mean.square()).clamp(min=0) + eps)
        scale = (inverse * weight.view(groups, -1)).view(B, C)
        shift = bias - (mean * scale.view(B, groups, -1)).view(B, C)
        out = torch.empty_like(x)
        _apply[_grid(N * C, B)](x, x, scale, shift, scale, shift, out, N, C, False, silu, BLOCK)
        ctx.save_for_backward(x, weight, scale, shift, mean, inverse)
        ctx.groups, ctx.silu = groups, silu
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        x, weight, scale, shift, mean, inverse = ctx.saved_tensors
        g, groups = grads[0].contiguous(), ctx.groups
        B, C = scale.shape
        N = x[0].numel() // C
        one, two = _both(x, g, scale, shift, True, ctx.silu)
        own = weight.view(groups, -1)
        du, along = one.view(B, groups, -1), two.view(B, groups, -1)
        along = inverse * (along - mean * du)  # of du with the normed x
        level, lean = (by_group((part * own).view(B, C), groups) / N for part in (du, along))
        slope = (-inverse.square() * lean).expand_as(du).reshape(B, C)
        rest = (inverse * (inverse * mean * lean - level)).expand_as(du).reshape(B, C)
        dx = torch.empty_like(x)
        _apply[_grid(N * C, B)](x, g, scale, shift, slope, rest, dx, N, C, True, ctx.silu, BLOCK)
        return dx, along.sum(0).view(C), one.sum(0), None, None, None


def by_group(sums_BC: Tensor, groups: int) -> Tensor:
    """Mean over the channels of each group, (B, G, 1)."""
    return sums_BC.view(len(sums_BC), groups, -1).mean(2, keepdim=True)


def _grid(size: int, B: int) -> tuple[int, int]:
    return triton.cdiv(size, BLOCK), B


def _both(x: Tensor, g: Tensor, scale: Tensor, shift: Tensor, back: bool, silu: bool) -> tuple[Tensor, Tensor]:
    B, C = x.shape[0], x.shape[-1]
    N = x[0].numel() // C
    programs = triton.cdiv(N, ROWS)
    parts = torch.empty(2, B, programs, C, device=x.device)
    wide = triton.next_power_of_2(C)
    _sums[(programs, B)](x, g, scale, shift, parts[0], parts[1], N, C, wide, back, silu, ROWS, STEP)
    one, two = parts.sum(2)
    return one, two


def norm(group: Any, x: Tensor, silu: bool) -> Tensor:
    """`group` (nn.GroupNorm) of x, then SiLU if asked for; statistics in float32."""
    out: Tensor = _Norm.apply(x, group.weight, group.bias, group.num_groups, group.eps, silu)
    return out


@triton.jit
def _gather(x_ptr, out_ptr, T, To, H, W, stride, C: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """One row of one output frame a program (and a part of that row), so that little is divided."""
    row = tl.program_id(0)
    frame, y = row // (H + 2), row % (H + 2)
    b, t = frame // To, frame % To
    y = tl.minimum(tl.maximum(y - 1, 0), H - 1)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < (W + 2) * WIDE
    tap, c = place % WIDE // C, place % WIDE % C
    x = tl.minimum(tl.maximum(place // WIDE - 1, 0), W - 1)
    of = ((b * T + tl.maximum(t * stride + tap - 2, 0)) * H + y) * W + x
    value = tl.load(x_ptr + of.to(tl.int64) * C + c, mask=mask & (tap < 3), other=0.0)
    tl.store(out_ptr + row.to(tl.int64) * (W + 2) * WIDE + place, value, mask=mask)


@triton.jit
def _row(g_ptr, row, x, mask, W, c, WIDE: tl.constexpr):
    """Of one padded row what falls on each place: its own column, and the border's on the outermost."""
    g_ptr += row.to(tl.int64) * (W + 2) * WIDE + c
    total = tl.load(g_ptr + (x + 1) * WIDE, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(g_ptr, mask=mask & (x == 0), other=0.0).to(tl.float32)
    return total + tl.load(g_ptr + (W + 1) * WIDE, mask=mask & (x == W - 1), other=0.0).to(tl.float32)


@triton.jit
def _rows(g_ptr, frame, y, x, mask, H, W, c, WIDE: tl.constexpr):
    total = _row(g_ptr, frame * (H + 2) + y + 1, x, mask, W, c, WIDE)
    if y == 0:
        total += _row(g_ptr, frame * (H + 2), x, mask, W, c, WIDE)
    if y == H - 1:
        total += _row(g_ptr, frame * (H + 2) + H + 1, x, mask, W, c, WIDE)
    return total


@triton.jit
def _gather_back(g_ptr, dx_ptr, T, To, H, W, stride, C: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    frame, y = tl.program_id(0) // H, tl.program_id(0) % H
    b, t = frame // T, frame % T
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = place < W * C
    x, c = place // C, place % C
    total = tl.zeros((BLOCK,), tl.float32)
    for tap in tl.static_range(3):
        late = t + 2 - tap
        if (late % stride == 0) & (late // stride < To):
            total += _rows(g_ptr, b * To + late // stride, y, x, mask, H, W, tap * C + c, WIDE)
        for early in tl.static_range(2 - tap):  # outputs that would read before the start
            if (t == 0) & (early * stride + tap < 2) & (early < To):
                total += _rows(g_ptr, b * To + early, y, x, mask, H, W, tap * C + c, WIDE)
    at = tl.program_id(0).to(tl.int64) * W * C + place
    tl.store(dx_ptr + at, total.to(dx_ptr.dtype.element_ty), mask=mask)


class _Taps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stride: int) -> Tensor:
        x = x.contiguous()
        B, T, H, W, C = x.shape
        To = (T - 1) // stride + 1
        wide = 3 * C + -3 * C % 8
        out = x.new_empty(B, To, H + 2, W + 2, wide)
        grid = (B * To * (H + 2), triton.cdiv((W + 2) * wide, BLOCK))
        _gather[grid](x, out, T, To, H, W, stride, C, wide, BLOCK)
        ctx.shape, ctx.stride = x.shape, stride
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        g = grads[0].contiguous()
        B, T, H, W, C = ctx.shape
        dx = g.new_empty(ctx.shape)
        grid = (B * T * H, triton.cdiv(W * C, BLOCK))
        _gather_back[grid](g, dx, T, g.shape[1], H, W, ctx.stride, C, g.shape[4], BLOCK)
        return dx, None


def taps(x: Tensor, stride: int) -> Tensor:
    """(B, To, H + 2, W + 2, 3C): frames t - 2, t - 1, t side by side, edges repeated; channels filled up to eights."""
    out: Tensor = _Taps.apply(x, stride)
    return out
