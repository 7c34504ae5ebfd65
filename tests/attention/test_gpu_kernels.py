"""Every exact kernel that runs on this GPU: output, log-sum-exp, masks and grouped heads against float64."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from reference import assert_close, attention, tolerance
from torch._dynamo.utils import counters

from diptych.attention import KERNELS, LocalAttend, Need, Role, exponents, int8, merge_kernel, unified_attention
from diptych.attention import merge as merging
from diptych.attention.kernels import need_of
from diptych.attention.place import Place
from diptych.attention.plan import Plan
from diptych.attention.queries import Queries
from diptych.model import ops

if not torch.cuda.is_available():
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)
pytestmark = pytest.mark.gpu

KERNELS_BY_NAME = {kernel.name: kernel for kernel in KERNELS if kernel.device == "cuda"}
ON_GPU = [kernel for kernel in KERNELS if kernel.device in (None, "cuda") and kernel.exact and not kernel.bounded]


def tensors(dtype: torch.dtype, kv_heads: int, head_dim: int, queries: int, keys: int) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = (queries, 4), (keys, kv_heads), (keys, kv_heads)
    return [torch.randn(2, n, h, head_dim, device="cuda", generator=generator).to(dtype) for n, h in shapes]


def plain_float32(q, k, v, mask, expected) -> tuple[float, float]:
    """Three times what plain matrix products on the CPU are off by: it grows with the head size.

    Of the log-sum-exp two steps of float32 at least: few values can all be rounded well by luck, and the products and
    the sum of another kernel are rounded in another order.
    """
    host = [None if x is None else x.cpu() for x in (q, k, v, mask)]
    out, lse = LocalAttend("sdpa-math").with_lse(Role.VISUAL_SELF, *host)
    seen = torch.isfinite(expected[1])
    step = float(torch.finfo(torch.float32).eps * expected[1][seen].abs().max())
    lse_error = float((lse - expected[1])[seen].abs().max())
    return 3 * float((out - expected[0]).abs().max()), max(3 * lse_error, 2 * step)


@pytest.mark.parametrize("kernel", ON_GPU, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("queries", "keys"), [(130, 257), (1, 77), (225, 33)])
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_equals_the_reference(kernel, dtype, head_dim, queries, keys, kv_heads, masked) -> None:
    q, k, v = tensors(dtype, kv_heads, head_dim, queries, keys)
    mask = None
    if masked:
        mask = torch.rand(2, keys, device="cuda") > 0.5
        mask[0, : keys // 2] = False
        mask[1] = False
    if kernel.refusal(need_of(q, k, mask, True)) is not None:
        pytest.skip("says that it cannot")
    out, lse = kernel.with_lse(q, k, v, mask)
    expected = tuple(x.cpu() for x in attention(q, k, v, mask))
    limits = plain_float32(q, k, v, mask, expected) if dtype == torch.float32 else None
    assert_close(out.cpu(), lse.cpu(), expected, v, dtype, limits)
    alone = kernel(q, k, v, mask)
    assert torch.equal(alone, out)


@pytest.mark.parametrize("name", list(dict.fromkeys(kernel.name for kernel in ON_GPU)))
def test_compiles_whole(name: str) -> None:
    q, k, v = tensors(torch.bfloat16, 4, 64, 130, 130)

    def run(q, k, v):
        attended = unified_attention(q, k, v, Plan(Place(), (130,)), kernel=name, return_lse=True)
        return attended.out_BsHK, attended.lse_BsH

    out, lse = torch.compile(run, fullgraph=True)(q, k, v)
    assert_close(out.cpu(), lse.cpu(), tuple(x.cpu() for x in attention(q, k, v)), v, torch.bfloat16)


def test_strided_input_is_taken_as_it_is() -> None:
    """Heads and tokens often arrive as views: of a fused projection, of an exchange."""
    generator = torch.Generator("cuda").manual_seed(0)
    qkv = torch.randn(2, 100, 3, 4, 64, device="cuda", generator=generator).bfloat16()
    q, k, v = qkv.unbind(2)
    for kernel in ON_GPU:
        out, lse = LocalAttend(kernel.name).with_lse(Role.VISUAL_SELF, q, k, v)
        assert_close(out.cpu(), lse.cpu(), tuple(x.cpu() for x in attention(q, k, v)), v, torch.bfloat16)


@pytest.mark.parametrize(
    "kernel",
    [kernel for kernel in (*ON_GPU, KERNELS_BY_NAME["bounded"]) if kernel.name != "sdpa-math"],
    ids=lambda x: x.name,
)
def test_a_head_has_the_same_bits_however_many_are_computed(kernel) -> None:
    """What makes pure Ulysses exact: a rank computes fewer heads, each whole. At the size of a 5 second clip on Lite;
    with few tokens and heads some kernels split the keys, and then it depends on the number of heads."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(1, 51_840, 28, 64, device="cuda", generator=generator).bfloat16() for _ in range(3))
    bound = None
    if kernel.bounded:
        if kernel.refusal(need_of(q, k, None, False, 1.0)) is not None:
            pytest.skip("says that it cannot")
        q, bound = q * exponents.factor(64), exponents.MOST
    whole = kernel(q, k, v, bound=bound)
    for start, stop in ((0, 14), (7, 14), (25, 28)):  # of 2, 4 and 8 ranks
        few = (x[:, :, start:stop].contiguous() for x in (q, k, v))
        assert torch.equal(kernel(*few, bound=bound), whole[:, :, start:stop])


needs_bounded = pytest.mark.skipif(
    KERNELS_BY_NAME["bounded"].refusal(Need(torch.device("cuda"), torch.bfloat16, 64, 9, 9, *3 * [False], 1.0))
    is not None,
    reason="needs a Hopper GPU",
)


def with_factor(B: int, queries: int, keys: int, H: int, K: int) -> list[torch.Tensor]:
    """Normalised queries that carry the factor, normalised keys, values; and the same queries in float64 without it."""
    draw = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(B, n, H, K, device="cuda", generator=draw) for n in (queries, keys, keys))
    q, k = (x * x.square().mean(-1, keepdim=True).rsqrt() for x in (q, k))
    q, k, v = (q * exponents.factor(K)).bfloat16(), k.bfloat16(), v.bfloat16()
    return [q, k, v, q.double() / exponents.factor(K)]


@needs_bounded
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize(
    ("B", "queries", "keys", "H"),
    [
        (1, 1, 1, 1),
        (2, 65, 1, 2),
        (1, 3, 200, 5),
        (2, 130, 128, 3),
        (1, 193, 129, 2),
        (1, 225, 1000, 3),
        (3, 500, 385, 2),
    ],
)
def test_scores_with_a_bound(K, B, queries, keys, H) -> None:
    """Tiles that end beyond the last query or key, one tile and many, several batch entries."""
    q, k, v, exact_q = with_factor(B, queries, keys, H, K)
    kernel = KERNELS_BY_NAME["bounded"]
    out, lse = kernel.with_lse(q, k, v, bound=20.0)
    expected = tuple(x.cpu() for x in attention(exact_q, k, v))
    assert_close(out.cpu(), lse.cpu(), expected, v, torch.bfloat16, (tolerance(torch.bfloat16, v), 2e-5))
    assert torch.equal(kernel(q, k, v, bound=20.0), out)
    many = torch.cat([v.new_full((B, 7, H, K), float("nan")), v], 1)[:, 7:]  # a view that starts in the middle
    assert torch.equal(kernel(q, k, many, bound=20.0), out)


@needs_bounded
@pytest.mark.parametrize("K", [64, 128])
@pytest.mark.parametrize(
    ("B", "queries", "keys", "H"),
    [(1, 1, 1, 1), (2, 65, 1, 2), (1, 3, 200, 5), (2, 130, 128, 3), (1, 5000, 129, 32), (1, 51_840, 225, 7)],
)
def test_few_keys(K, B, queries, keys, H) -> None:
    """Queries finished here or by the kernel; results in both dtypes; rows beyond the last are not written."""
    q, k, v, exact_q = with_factor(B, queries, keys, H, K)
    kernel = KERNELS_BY_NAME["bounded-short"]
    expected = tuple(x.cpu() for x in attention(exact_q, k, v))
    out = kernel(q, k, v, bound=20.0)
    assert_close(out.cpu(), None, expected, v, torch.bfloat16)
    many = torch.cat([v.new_full((B, 7, H, K), float("nan")), v], 1)[:, 7:]
    assert torch.equal(kernel(q, k, many, bound=20.0), out)
    assert torch.equal(kernel(q[:, :, :1], k[:, :, :1], v[:, :, :1], bound=20.0), out[:, :, :1]), "a head alone"

    draw = torch.Generator("cuda").manual_seed(1)
    raw = (3 * torch.randn(q.shape, device="cuda", generator=draw)).bfloat16()
    weight = (1 + 0.3 * torch.randn(K, device="cuda", generator=draw)).bfloat16()
    made = ops.norm_rotate(raw, weight, None, scale=exponents.factor(K))
    want = kernel(made, k, v, bound=40.0)
    queries_ = Queries(raw, weight, exponents.factor(K), ops.RMS_NORM_EPS)
    fused = kernel(queries_, k, v, bound=40.0)
    assert float((fused.float() - want.float()).norm() / want.float().norm()) < 1e-3, "a sum in another order"
    scale = ops.common_scale(v)
    eight = kernel(queries_._replace(fp8_scale=scale), k, v, bound=40.0)
    assert eight.dtype == torch.float8_e4m3fn
    torch.testing.assert_close(eight.float() * scale, fused.float(), rtol=2.0**-4 + 2.0**-8, atol=float(scale) / 512)


@needs_bounded
@pytest.mark.parametrize(
    ("B", "queries", "keys", "H"), [(1, 1, 1, 1), (2, 65, 1, 2), (2, 130, 128, 3), (1, 193, 129, 2), (3, 500, 385, 2)]
)
def test_scores_in_int8(B, queries, keys, H) -> None:
    """As attention to what the twin rounds, and as the exact one within that rounding; keys share an offset."""
    q, k, v, _ = with_factor(B, queries, keys, H, 128)
    k = (k + torch.randn(128, device="cuda")).bfloat16()
    kernel = KERNELS_BY_NAME["bounded-int8"]
    out, lse = kernel.with_lse(q, k, v, bound=60.0)
    turned = []
    for x in (q, k):
        values, scale = int8.rounded_plainly(x)
        scale = scale.repeat_interleave(int8.TOKENS, 2)[:, :, : values.shape[1]]
        turned.append(values.double() * scale.transpose(1, 2).unsqueeze(-1))
    played = attention(turned[0] / exponents.factor(128), turned[1], v)
    assert float((out - played[0]).norm() / played[0].norm()) < 0.005
    assert (
        float((lse - played[1]).abs().max()) < 0.02
    )  # where a value lies between two steps the kernel may take another
    exact = attention(q.double() / exponents.factor(128), k, v)[0]
    assert float((out - exact).norm() / exact.norm()) < 0.06
    assert torch.equal(kernel(q, k, v, bound=60.0), out)


@needs_bounded
def test_int8_at_the_size_of_a_clip() -> None:
    q, k, v, exact_q = with_factor(1, 51_840, 51_840, 4, 128)
    rows = slice(20_000, 20_200)
    expected = attention(exact_q[:, rows, :1], k[:, :, :1], v[:, :, :1])[0]
    out = KERNELS_BY_NAME["bounded-int8"](q, k, v, bound=20.0)
    error = float((out[:, rows, :1] - expected).norm() / expected.norm())
    assert error < 0.02, "a hundredth of the queries and of the keys is rounding, and scores are of size one"
    few = KERNELS_BY_NAME["bounded-int8"](*(x[:, :, 1:3].contiguous() for x in (q, k, v)), bound=20.0)
    assert torch.equal(few, out[:, :, 1:3]), "pure Ulysses keeps every bit"


@needs_bounded
@pytest.mark.parametrize("K", [64, 128])
def test_the_largest_scores_that_a_bound_allows(K) -> None:
    """One key that every query meets at 2^90, one at 2^-90, and values up to 2^17: finite, and right."""
    side = (exponents.MOST / K) ** 0.5
    q = torch.full((1, 70, 2, K), side, device="cuda").bfloat16()
    k = torch.randn(1, 300, 2, K, device="cuda").bfloat16()
    k[:, 100] = side
    k[:, 200] = -side
    v = (torch.randn(1, 300, 2, K, device="cuda") * 2**15).bfloat16()
    kernel = KERNELS_BY_NAME["bounded"]
    out = kernel(q, k, v, bound=exponents.MOST)
    assert torch.isfinite(out).all()
    torch.testing.assert_close(out, v[:, 100:101].expand_as(out), rtol=0.01, atol=0)
    low = kernel(-q, k[:, 100:101], v[:, 100:101], bound=exponents.MOST)
    torch.testing.assert_close(low, v[:, 100:101].expand_as(low), rtol=0.01, atol=0)


@needs_bounded
@pytest.mark.parametrize("K", [64, 128])
def test_error_at_the_size_of_a_clip_is_that_of_flash_attention(K) -> None:
    q, k, v, exact_q = with_factor(1, 51_840, 51_840, 4, K)
    rows = slice(20_000, 20_200)
    expected = attention(exact_q[:, rows, :1], k[:, :, :1], v[:, :, :1])[0]
    errors = {
        name: float((KERNELS_BY_NAME[name](q, k, v, bound=20.0)[:, rows, :1] - expected).norm() / expected.norm())
        for name in ("bounded", "sdpa-flash", "sdpa-cudnn")
    }
    assert errors["bounded"] <= 1.05 * max(errors["sdpa-flash"], errors["sdpa-cudnn"]), errors


def partial_results(kernel, dtype: torch.dtype, count: int, dead: tuple[int, ...] = ()) -> tuple[list, list]:
    """What a ring merges: attention to each of `count` parts of the keys, `dead` ones all masked; and q, k, v, mask."""
    q, k, v = tensors(dtype, 4, 64, 130, 60 * count)
    mask = torch.ones(2, 60 * count, dtype=torch.bool, device="cuda")
    for part in dead:
        mask[:, 60 * part : 60 * part + 60] = False
    chunks = zip(k.chunk(count, 1), v.chunk(count, 1), mask.chunk(count, 1), strict=True)
    parts = [kernel.with_lse(q, k_part, v_part, seen if dead else None) for k_part, v_part, seen in chunks]
    return parts, [q, k, v, mask]


@pytest.mark.parametrize("kernel", ON_GPU, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dead", [(), (0,), (1,), (0, 1, 2)], ids=str)
@pytest.mark.parametrize("count", [2, 8])
def test_merged_parts_equal_the_whole(kernel, dtype, dead, count, monkeypatch) -> None:
    """By the kernel, within a rounding of plain torch: a part without a visible key weighs nothing, wherever it is."""
    dead = tuple(part for part in dead if part < count)
    q, k, _ = tensors(dtype, 4, 64, 130, 60)
    if kernel.refusal(need_of(q, k, torch.ones(2, 60) if dead else None, True)) is not None:
        pytest.skip("says that it cannot")
    parts, whole = partial_results(kernel, dtype, count, dead)
    before = [(out.clone(), lse.clone()) for out, lse in parts]
    with patch.object(merge_kernel, "added", wraps=merge_kernel.added) as added:
        out, lse = merging.merge(parts, dtype)
    assert added.call_count == count - 1
    expected = tuple(x.cpu() for x in attention(*whole))
    limits = None
    if dtype == torch.float32 and len(dead) < count:  # merging adds a few steps of float32 to what each part is off by
        limits = tuple(limit + 2e-6 for limit in plain_float32(*whole, expected))
    assert_close(out.cpu(), lse.cpu(), expected, whole[2], dtype, limits)
    assert all(
        torch.equal(x, y) for part, kept in zip(parts, before, strict=True) for x, y in zip(part, kept, strict=True)
    )
    again, again_lse = merging.merge([(out.clone(), lse.contiguous()) for out, lse in parts], dtype)
    assert torch.equal(again, out) and torch.equal(again_lse, lse)
    monkeypatch.setattr(merging, "fusible", lambda *_: False)
    plain, plain_lse = merging.merge(parts, dtype)
    step = torch.finfo(dtype).eps if dtype == torch.bfloat16 else 0
    torch.testing.assert_close(out, plain, rtol=step, atol=2e-6)
    torch.testing.assert_close(lse, plain_lse, rtol=4 * torch.finfo(torch.float32).eps, atol=1e-6)
    if dtype == torch.bfloat16:
        assert (out != plain).float().mean() < 0.01


def test_merging_compiles_whole() -> None:
    """One graph, and the bits of the kernel that runs without a compiler."""
    parts, _ = partial_results(KERNELS_BY_NAME["sdpa-flash"], torch.bfloat16, 8)
    want = merging.merge(parts, torch.bfloat16)
    torch._dynamo.reset()
    counters.clear()
    got = torch.compile(merging.merge, fullgraph=True)(parts, torch.bfloat16)
    assert counters["stats"]["unique_graphs"] == 1
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("count", [2, 8])
def test_merging_takes_one_sum_and_the_result(count: int, compiled: bool) -> None:
    """Above the parts: float32 and bf16 of one output, and the rows' numbers. Plain torch takes no less."""
    parts = [(torch.randn(1, 4096, 16, 128, device="cuda").bfloat16(), torch.randn(1, 4096, 16, device="cuda"))] * count
    values, rows = parts[0][0].numel(), parts[0][1].numel()
    merge = torch.compile(merging.merge, fullgraph=True) if compiled else merging.merge

    def peak() -> int:
        merge(parts, torch.bfloat16)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        merge(parts, torch.bfloat16)
        return torch.cuda.max_memory_allocated() - before

    fused = peak()
    assert fused <= (4 * (count > 2) + 2) * values + 5 * 4 * rows + 2**16
    if not compiled:
        with patch.object(merging, "fusible", return_value=False):
            assert fused <= peak()
