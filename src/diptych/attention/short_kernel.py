"""Attention of many queries to few keys, whose scores have a bound (Gluon, Hopper).

With a few hundred keys attention costs hardly more than its bytes, if keys and values are read once. So a program takes
one head, keeps its keys and values in shared memory, and walks over queries: 192 at a time, 64 for each of three
warpgroups, while one warp fetches the next. Results leave by TMA from where their queries were. A warpgroup may
normalise its queries when they arrive, and give its results in e4m3: passes of their own otherwise, each of which costs
half of what the attention does.
"""

from __future__ import annotations

from functools import cache

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

from diptych.attention.bounded_kernel import GROUPS, ROWS, described, sums_of, to_operand, weights_of
from diptych.attention.queries import HELD, Queries

KEYS = gl.constexpr(64)
STAGES = gl.constexpr(2)


@gluon.jit
def _normalise(q, weight_ptr, scale, eps, K: gl.constexpr, LAYOUT: gl.constexpr):
    """RMSNorm of each row where it lies."""
    x = q.load(LAYOUT).to(gl.float32)
    weight = gl.load(weight_ptr + gl.arange(0, K, gl.SliceLayout(0, LAYOUT))).to(gl.float32) * scale
    x = x * gl.rsqrt(gl.sum(x * x, 1) / K + eps)[:, None] * weight[None, :]
    q.store(x.to(gl.bfloat16))
    fence_async_shared()


@gluon.jit
def _attend(
    q_smem, k_smem, v_smem, q_full, q_done, kv_full, out_desc, weight_ptr, fp8_scale_ptr, scale, eps,
    S, first, last, h,
    GROUP: gl.constexpr, K: gl.constexpr, NORM: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    """One warpgroup: its 64 of every 192 queries. The tile that may end beyond the last key comes first."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    none = gl.zeros((ROWS, KEYS), gl.float32, SCORES)
    nothing = gl.zeros((ROWS, K), gl.float32, OUT)
    tiles = gl.cdiv(S, KEYS)
    unit = 1.0
    if FP8:
        unit = 1.0 / gl.load(fp8_scale_ptr)
    stage = 0
    phase = 0
    before = 0
    for row_tile in range(first, last):
        slot = stage * GROUPS + GROUP
        q = q_smem.index(slot)
        mbarrier.wait(q_full.index(slot), phase)
        if NORM:
            _normalise(q, weight_ptr, scale, eps, K, OUT)
        mbarrier.wait(kv_full.index(tiles - 1), 0)
        s = warpgroup_mma(q, k_smem.index(tiles - 1).permute((1, 0)), none, use_acc=False, is_async=True)
        if row_tile != first:  # by now the results before have left their place
            tma.store_wait(0)
            mbarrier.arrive(q_done.index(before), count=1)
        s = warpgroup_mma_wait(0, deps=(s,))
        e = weights_of(s, 1.0, (tiles - 1) * KEYS, S, True, False, SCORES)
        total = sums_of(e)
        weights = to_operand(e, OPERAND)
        out = nothing
        values = tiles - 1
        for tile in range(0, tiles - 1):
            mbarrier.wait(kv_full.index(tile), 0)
            s = warpgroup_mma(q, k_smem.index(tile).permute((1, 0)), none, use_acc=False, is_async=True)
            out = warpgroup_mma(weights, v_smem.index(values), out, is_async=True)
            s = warpgroup_mma_wait(1, deps=(s,))
            e = weights_of(s, 1.0, 0, S, False, False, SCORES)
            total = total + sums_of(e)
            out, weights, e, total = warpgroup_mma_wait(0, deps=(out, weights, e, total))
            weights = to_operand(e, OPERAND)
            values = tile
        out = warpgroup_mma(weights, v_smem.index(values), out, is_async=True)
        out = warpgroup_mma_wait(0, deps=(out,))
        out = out * (unit / gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, OUT)))[:, None]
        if FP8:
            place = q._reinterpret(gl.float8e4nv, [2, ROWS, K], out_desc.layout).index(0)
            place.store(out.to(gl.float8e4nv))
        else:
            place = q
            place.store(out.to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(out_desc, [(row_tile * GROUPS + GROUP) * ROWS, h * K], place)
        before = slot
        wraps = stage == STAGES - 1
        stage = gl.where(wraps, 0, stage + 1)
        phase = gl.where(wraps, phase ^ 1, phase)
    tma.store_wait(0)


@gluon.jit
def _fetch(
    q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_done, kv_full, S, first, last, h, K: gl.constexpr
):  # fmt: skip
    """The warp that fetches. Tokens beyond the last are zeros: masked as keys, not stored as queries."""
    tiles = gl.cdiv(S, KEYS)
    for n in range(tiles):
        tile = gl.where(n == 0, tiles - 1, n - 1)
        mbarrier.expect(kv_full.index(tile), KEYS * K * 4)
        tma.async_copy_global_to_shared(k_desc, [tile * KEYS, h * K], kv_full.index(tile), k_smem.index(tile))
        tma.async_copy_global_to_shared(v_desc, [tile * KEYS, h * K], kv_full.index(tile), v_smem.index(tile))
    stage = 0
    phase = 0
    for row_tile in range(first, last):
        for group in gl.static_range(GROUPS):
            slot = stage * GROUPS + group
            row = (row_tile * GROUPS + group) * ROWS
            mbarrier.wait(q_done.index(slot), phase ^ 1)
            mbarrier.expect(q_full.index(slot), ROWS * K * 2)
            tma.async_copy_global_to_shared(q_desc, [row, h * K], q_full.index(slot), q_smem.index(slot))
        wraps = stage == STAGES - 1
        stage = gl.where(wraps, 0, stage + 1)
        phase = gl.where(wraps, phase ^ 1, phase)


@gluon.jit(do_not_specialize=["scale", "eps", "Q", "S", "each"])
def _bounded_short_attention(
    q_desc, k_desc, v_desc, out_desc, weight_ptr, fp8_scale_ptr, scale, eps, Q, S, each,
    K: gl.constexpr, SLOTS: gl.constexpr, NORM: gl.constexpr, FP8: gl.constexpr,
):  # fmt: skip
    h = gl.program_id(1)
    first = gl.program_id(0) * each
    last = gl.minimum(first + each, gl.cdiv(Q, GROUPS * ROWS))
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES * GROUPS, ROWS, K], q_desc.layout)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, KEYS, K], k_desc.layout)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, KEYS, K], v_desc.layout)
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES * GROUPS, 1], mbarrier.MBarrierLayout())
    q_done = gl.allocate_shared_memory(gl.int64, [STAGES * GROUPS, 1], mbarrier.MBarrierLayout())
    kv_full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES * GROUPS):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(q_done.index(i), count=1)
    for i in gl.static_range(SLOTS):
        mbarrier.init(kv_full.index(i), count=1)
    fence_async_shared()
    # fmt: off
    gl.warp_specialize(
        [
            (_attend, (q_smem, k_smem, v_smem, q_full, q_done, kv_full, out_desc, weight_ptr, fp8_scale_ptr, scale, eps,
                       S, first, last, h, 0, K, NORM, FP8)),
            (_attend, (q_smem, k_smem, v_smem, q_full, q_done, kv_full, out_desc, weight_ptr, fp8_scale_ptr, scale, eps,
                       S, first, last, h, 1, K, NORM, FP8)),
            (_attend, (q_smem, k_smem, v_smem, q_full, q_done, kv_full, out_desc, weight_ptr, fp8_scale_ptr, scale, eps,
                       S, first, last, h, 2, K, NORM, FP8)),
            (_fetch, (q_desc, k_desc, v_desc, q_smem, k_smem, v_smem, q_full, q_done, kv_full, S, first, last, h, K)),
        ],
        [4, 4, 1],
        [160, 160, 24],
    )
    # fmt: on


def attention(q: Queries, k_BSHK: Tensor, v_BSHK: Tensor) -> Tensor:
    """Softmax to the base two of q k, no larger than `exponents.MOST`, times v: bf16, heads of 64 or 128, at most
    `HELD` / K keys. In float8_e4m3fn where the queries have an `fp8_scale`."""
    out: Tensor = _op(q.x_BSHK, k_BSHK, v_BSHK, q.weight_K, q.scale, q.eps, q.fp8_scale)
    return out


@torch.library.custom_op(
    "diptych_attention::bounded_short",
    mutates_args=(),
    schema="(Tensor q_BSHK, Tensor k_BSHK, Tensor v_BSHK, Tensor? weight_K, float scale, float eps, Tensor? fp8_scale)"
    " -> Tensor",
)
def _op(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHK: Tensor,
    weight_K: Tensor | None,
    scale: float,
    eps: float,
    fp8_scale: Tensor | None,
) -> Tensor:
    """An operator of torch's, so that a compiler keeps it whole and a trace sees an attention."""
    B, Q, H, K = q_BSHK.shape
    S, keys = k_BSHK.shape[1], KEYS.value
    assert S * K <= HELD, f"{S} keys of {K} channels do not fit beside their values"
    out = _empty(q_BSHK, fp8_scale)
    programs, each = shares(triton.cdiv(Q, GROUPS.value * ROWS.value), H, _processors(q_BSHK.device))
    for b in range(B):
        _bounded_short_attention[programs, H](
            described(q_BSHK[b], ROWS.value), described(k_BSHK[b], keys), described(v_BSHK[b], keys),
            described(out[b], ROWS.value),
            out if weight_K is None else weight_K, out if fp8_scale is None else fp8_scale, scale, eps, Q, S, each,
            K=K, SLOTS=HELD // (K * keys), NORM=weight_K is not None, FP8=fp8_scale is not None, num_warps=4,
        )  # fmt: skip
    return out


@_op.register_fake
def _shape(
    q_BSHK: Tensor,
    k_BSHK: Tensor,
    v_BSHK: Tensor,
    weight_K: Tensor | None,
    scale: float,
    eps: float,
    fp8_scale: Tensor | None,
) -> Tensor:
    return _empty(q_BSHK, fp8_scale)


def _empty(q_BSHK: Tensor, fp8_scale: Tensor | None) -> Tensor:
    dtype = torch.bfloat16 if fp8_scale is None else torch.float8_e4m3fn
    return torch.empty(q_BSHK.shape, dtype=dtype, device=q_BSHK.device)


def shares(tiles: int, heads: int, processors: int) -> tuple[int, int]:
    """Programs a head, and tiles of queries for each, so that the last processor is done soonest.

    To fetch keys and values takes a program about as long as a tile of queries.
    """

    def rounds(programs: int) -> int:
        return -(-programs * heads // processors) * (-(-tiles // programs) + 1)

    each = -(-tiles // min(range(1, tiles + 1), key=rounds))
    return -(-tiles // each), each


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
