"""Softmax attention without a running maximum, for scores whose bound is known beforehand (Gluon, Hopper).

FlashAttention follows the largest score of each row to keep its weights small, and rescales what it has when that
grows. Where `exponents.bound` says that 2^s is finite whatever comes, all of that falls away: a score costs its
exponential, an addition to the row's sum and a conversion. On heads of 64, whose products are too short to hide more,
that is what counts.

A program computes 192 queries of one head: three warpgroups of 64 queries, and one warp that fetches tiles of keys and
values by TMA into a ring of stages. A warpgroup starts the product of its queries and the next keys, then that of the
weights it has and the values before; while the second runs, it takes the exponentials of the first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from diptych.attention.int8 import Rounded

GROUPS = gl.constexpr(3)
ROWS = gl.constexpr(64)
LN_2 = gl.constexpr(0.6931471805599453)
KINDS = {torch.bfloat16: gl.bfloat16, torch.int8: gl.int8, torch.float8_e4m3fn: gl.float8e4nv}


class Tile(NamedTuple):
    """Keys of a tile, and how many tiles of keys and values are held at once."""

    keys: int
    stages: int


TILES = {64: Tile(128, 4), 128: Tile(64, 3)}
"""By head size, the fastest on an H200 of those whose accumulators fit into 160 registers a thread."""
TILES_INT8 = {128: Tile(64, 4)}
"""The same where queries and keys are int8. Heads of 64 have none: their limit is exponentials, not products."""


@gluon.jit
def weights_of(s, scale, first, S, MASKED: gl.constexpr, INT8: gl.constexpr, LAYOUT: gl.constexpr):
    """2^s. Keys from S on weigh nothing. INT8: s are whole, times scale."""
    if INT8:
        s = s.to(gl.float32) * scale
    if MASKED:
        keys = first + gl.arange(0, s.shape[1], gl.SliceLayout(0, LAYOUT))
        s = gl.where((keys < S)[None, :], s, float("-inf"))
    return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [s], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def sums_of(e):
    """Of each row four sums, each of what one thread holds: threads need not exchange theirs before the last tile."""
    return gl.sum(gl.sum(e.reshape((e.shape[0], e.shape[1] // 8, 4, 2)), 3), 1)


@gluon.jit
def to_operand(e, OPERAND: gl.constexpr):
    """To bf16, as the left side of a product. In assembly, or LLVM moves the conversion to where the products run and
    the assembler then runs those one by one."""
    half = gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [e], dtype=gl.bfloat16, is_pure=True, pack=2
    )
    return gl.convert_layout(half, OPERAND)


@gluon.jit
def _attend(
    q_smem, k_smem, v_smem, q_full, full, done, q_scale_ptr, k_scale_ptr, out_ptr, lse_ptr,
    Q, S, H, first_row, h,
    GROUP: gl.constexpr, KEYS: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, LSE: gl.constexpr,
    INT8: gl.constexpr,
):  # fmt: skip
    """One warpgroup: 64 queries and all keys. The tile that may end beyond the last key comes first."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 32 if INT8 else 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    tiles = gl.cdiv(S, KEYS)
    none = gl.zeros((ROWS, KEYS), gl.int32 if INT8 else gl.float32, SCORES)
    out = gl.zeros((ROWS, K), gl.float32, OUT)
    scale = 1.0
    q_scale = 1.0
    scales = k_scale_ptr + h * tiles
    if INT8:
        q_scale = gl.load(q_scale_ptr + h * gl.cdiv(Q, ROWS) + gl.minimum(first_row + GROUP * ROWS, Q - 1) // ROWS)
        scale = q_scale * gl.load(scales + tiles - 1)
    mbarrier.wait(q_full, 0)
    if INT8:  # in registers, which int8 leaves: from shared memory both sides would come faster than it can read
        q = q_smem.index(GROUP).load(gl.DotOperandLayout(0, SCORES, 4))
    else:
        q = q_smem.index(GROUP)
    mbarrier.wait(full.index(0), 0)
    s = warpgroup_mma(q, k_smem.index(0).permute((1, 0)), none, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s,))
    e = weights_of(s, scale, (tiles - 1) * KEYS, S, True, INT8, SCORES)
    total = sums_of(e)
    weights = to_operand(e, OPERAND)
    if INT8:
        scale = q_scale * gl.load(scales)
    before = 0
    stage = 1 % STAGES
    phase = 1 // STAGES
    for tile in range(1, tiles):
        mbarrier.wait(full.index(stage), phase)
        s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), none, use_acc=False, is_async=True)
        out = warpgroup_mma(weights, v_smem.index(before), out, is_async=True)
        following = scale
        if INT8:  # of the next tile, so that none waits for it
            following = q_scale * gl.load(scales + tile)
        s = warpgroup_mma_wait(1, deps=(s,))
        e = weights_of(s, scale, 0, S, False, INT8, SCORES)
        total = total + sums_of(e)
        out, weights, e, total = warpgroup_mma_wait(0, deps=(out, weights, e, total))
        mbarrier.arrive(done.index(before), count=1)
        weights = to_operand(e, OPERAND)
        scale = following
        before = stage
        wraps = stage == STAGES - 1  # counted on here, while exponentials are taken, not where a product waits for it
        stage = gl.where(wraps, 0, stage + 1)
        phase = gl.where(wraps, phase ^ 1, phase)
    out = warpgroup_mma(weights, v_smem.index(before), out, is_async=True)
    out = warpgroup_mma_wait(0, deps=(out,))
    rows = first_row + GROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, OUT))
    channels = gl.arange(0, K, gl.SliceLayout(0, OUT))
    total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, OUT))
    at = rows.to(gl.int64) * H + h
    out = out * (1.0 / total)[:, None]
    gl.store(out_ptr + (at * K)[:, None] + channels[None, :], out.to(gl.bfloat16), mask=(rows < Q)[:, None])
    if LSE:
        gl.store(lse_ptr + at, gl.log2(total) * LN_2, mask=rows < Q)


@gluon.jit
def _fetch(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, full, done, Q, S, first_row, h,
    KEYS: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, INT8: gl.constexpr,
):  # fmt: skip
    """The warp that fetches. Tokens beyond the last are zeros: masked as keys, not stored as queries."""
    BYTES: gl.constexpr = 1 if INT8 else 2
    tiles = gl.cdiv(S, KEYS)
    mbarrier.expect(q_full, GROUPS * ROWS * K * BYTES)
    for group in gl.static_range(GROUPS):
        tma.async_copy_global_to_shared(q_desc, [first_row + group * ROWS, h * K], q_full, q_smem.index(group))
    for tile in range(tiles):
        stage = tile % STAGES
        row = gl.where(tile == 0, tiles - 1, tile - 1) * KEYS
        mbarrier.wait(done.index(stage), ((tile // STAGES) & 1) ^ 1)
        mbarrier.expect(full.index(stage), KEYS * K * (BYTES + 2))
        tma.async_copy_global_to_shared(k_desc, [row, h * K], full.index(stage), k_smem.index(stage))
        tma.async_copy_global_to_shared(v_desc, [row, h * K], full.index(stage), v_smem.index(stage))


@gluon.jit(do_not_specialize=["Q", "S"])
def _bounded_attention(
    q_desc, k_desc, v_desc, q_scale_ptr, k_scale_ptr, out_ptr, lse_ptr, Q, S, H,
    KEYS: gl.constexpr, K: gl.constexpr, STAGES: gl.constexpr, LSE: gl.constexpr, INT8: gl.constexpr,
):  # fmt: skip
    first_row = gl.program_id(0) * (GROUPS * ROWS)
    h = gl.program_id(1)
    q_smem = gl.allocate_shared_memory(q_desc.dtype, [GROUPS, ROWS, K], q_desc.layout)
    k_smem = gl.allocate_shared_memory(k_desc.dtype, [STAGES, KEYS, K], k_desc.layout)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, K], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(done.index(i), count=GROUPS)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (_attend, (q_smem, k_smem, v_smem, q_full, full, done, q_scale_ptr, k_scale_ptr, out_ptr, lse_ptr,
                       Q, S, H, first_row, h, 0, KEYS, K, STAGES, LSE, INT8)),
            (_attend, (q_smem, k_smem, v_smem, q_full, full, done, q_scale_ptr, k_scale_ptr, out_ptr, lse_ptr,
                       Q, S, H, first_row, h, 1, KEYS, K, STAGES, LSE, INT8)),
            (_attend, (q_smem, k_smem, v_smem, q_full, full, done, q_scale_ptr, k_scale_ptr, out_ptr, lse_ptr,
                       Q, S, H, first_row, h, 2, KEYS, K, STAGES, LSE, INT8)),
            (_fetch, (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, full, done, Q, S, first_row, h,
                      KEYS, K, STAGES, INT8)),
        ],
        [4, 4, 1],
        [160, 160, 24],
    )
    # fmt: on


def layout(rows: int, K: int, dtype: Any = gl.bfloat16) -> Any:
    """How TMA lays a tile into shared memory."""
    return gl.NVMMASharedLayout.get_default_for([rows, K], dtype)


def attention(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, lse: bool) -> tuple[Tensor, Tensor | None]:
    """Softmax to the base two of q k, no larger than `exponents.MOST`, times v: bf16, heads of 64 or 128.

    The log-sum-exp is the natural one, float32 (B, S of q, H).
    """
    out_BSHK, lse_BSH = _op(q_BSHK, k_BSHK, v_BSHK, lse)
    return out_BSHK, lse_BSH if lse else None


def attention_int8(q: Rounded, k: Rounded, v_BSHK: Tensor, lse: bool) -> tuple[Tensor, Tensor | None]:
    """The same of queries and keys in int8, heads of 128."""
    out_BSHK, lse_BSH = _op_int8(q.values, k.values, v_BSHK, q.scale, k.scale, lse)
    return out_BSHK, lse_BSH if lse else None


@torch.library.custom_op(
    "diptych_attention::bounded",
    mutates_args=(),
    schema="(Tensor q_BSHK, Tensor k_BSHK, Tensor v_BSHK, bool lse) -> (Tensor, Tensor)",
)
def _op(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, lse: bool) -> tuple[Tensor, Tensor]:
    """An operator of torch's, so that a compiler keeps it whole and a trace sees an attention."""
    return _launch(q_BSHK, k_BSHK, v_BSHK, None, lse)


@torch.library.custom_op(
    "diptych_attention::bounded_int8",
    mutates_args=(),
    schema="(Tensor q_BSHK, Tensor k_BSHK, Tensor v_BSHK, Tensor q_scale, Tensor k_scale, bool lse)"
    " -> (Tensor, Tensor)",
)
def _op_int8(
    q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, q_scale: Tensor, k_scale: Tensor, lse: bool
) -> tuple[Tensor, Tensor]:
    return _launch(q_BSHK, k_BSHK, v_BSHK, (q_scale, k_scale), lse)


def _launch(
    q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, scales: tuple[Tensor, Tensor] | None, lse: bool
) -> tuple[Tensor, Tensor]:
    B, Q, H, K = q_BSHK.shape
    S, tile = k_BSHK.shape[1], (TILES if scales is None else TILES_INT8)[K]
    out, sums = _empty(q_BSHK, lse)
    for b in range(B):
        q_scale, k_scale = (out, out) if scales is None else (scales[0][b], scales[1][b])
        _bounded_attention[triton.cdiv(Q, GROUPS.value * ROWS.value), H](
            described(q_BSHK[b], ROWS.value), described(k_BSHK[b], tile.keys), described(v_BSHK[b], tile.keys),
            q_scale, k_scale, out[b], sums[b] if lse else out, Q, S, H,
            KEYS=tile.keys, K=K, STAGES=tile.stages, LSE=lse, INT8=scales is not None, num_warps=4,
        )  # fmt: skip
    return out, sums


def _empty(q_BSHK: Tensor, lse: bool) -> tuple[Tensor, Tensor]:
    shape = q_BSHK.shape
    sums = torch.empty(shape[:3] if lse else (0,), dtype=torch.float32, device=q_BSHK.device)
    return torch.empty(shape, dtype=torch.bfloat16, device=q_BSHK.device), sums


@_op.register_fake
def _shapes(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, lse: bool) -> tuple[Tensor, Tensor]:
    return _empty(q_BSHK, lse)


@_op_int8.register_fake
def _shapes_int8(
    q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, q_scale: Tensor, k_scale: Tensor, lse: bool
) -> tuple[Tensor, Tensor]:
    return _empty(q_BSHK, lse)


def described(x_SHK: Tensor, rows: int) -> TensorDescriptor:
    """Tokens as rows of all heads' channels, read `rows` tokens and one head at a time."""
    S, H, K = x_SHK.shape
    x_SHK = x_SHK.contiguous()
    return TensorDescriptor(x_SHK, [S, H * K], [H * K, 1], [rows, K], layout(rows, K, KINDS[x_SHK.dtype]))
