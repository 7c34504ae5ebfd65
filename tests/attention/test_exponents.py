"""Scores with a bound: that no score is above it, that every kernel takes them, and who asks for them."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
import torch
from reference import assert_close, attention
from test_kernels import CUDA, MASK, need
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from diptych.attention import LocalAttend, Plan, Role, cores, exponents, kernels, unified_attention
from diptych.attention.cores import bounded
from diptych.attention.place import Place
from diptych.errors import KernelError
from diptych.model import plain
from diptych.model.rope import rope_1d

HOPPER = (
    replace(next(kernel for kernel in kernels.KERNELS if kernel.name == "bounded"), usable=None, device="cuda"),
    replace(kernels.KERNELS[-1], name="fa3", best_from=1024),
    replace(kernels.KERNELS[-1], name="sdpa-cudnn"),
)


def normalised(weight_K: torch.Tensor, seed: int, tokens: int = 300, rotated: bool = True) -> torch.Tensor:
    """Heads as the model makes them of random ones, some of which have all their length in one pair of channels."""
    K = len(weight_K)
    x = torch.randn(1, tokens, 2, K, generator=torch.Generator().manual_seed(seed))
    x[:, ::3] *= 1e-3
    x[:, torch.arange(0, tokens, 3), 0, torch.arange(0, tokens, 3) % K] = 10.0
    return plain.norm_rotate(x, weight_K, rope_1d(tokens, K, x.device) if rotated else None)


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize("spread", [0.0, 0.7])
def test_no_score_is_above_the_bound(rotated: bool, spread: float) -> None:
    draw = torch.Generator().manual_seed(0)
    q_weight, k_weight = ((1 + spread * torch.randn(64, generator=draw)) for _ in range(2))
    q, k = normalised(q_weight, 1, rotated=rotated), normalised(k_weight, 2, rotated=rotated)
    limit = exponents.bound(q_weight, k_weight)
    largest = float(torch.einsum("bqhk,bshk->bhqs", q, k).abs().max()) * exponents.factor(64)
    assert 0.5 * limit < largest <= limit, "a bound that is far from what happens turns kernels away for nothing"


def test_a_rotation_brings_together_what_two_channels_of_a_pair_weigh() -> None:
    """Queries have their length in the one, keys in the other: a quarter of a turn later they point the same way."""
    q_weight, k_weight = torch.ones(2, 64).unbind(0)
    q_weight[0] = k_weight[1] = 5.0
    q, k = (torch.zeros(1, 20, 1, 64) for _ in range(2))
    q[..., 0] = k[..., 1] = 1.0
    rope = rope_1d(20, 64, q.device)
    q, k = plain.norm_rotate(q, q_weight, rope), plain.norm_rotate(k, k_weight, rope)
    largest = float(torch.einsum("bqhk,bshk->bhqs", q, k).abs().max()) * exponents.factor(64)
    limit = exponents.bound(q_weight, k_weight)
    assert 0.95 * limit < largest <= limit


def test_the_bound_follows_from_equal_weights() -> None:
    assert exponents.bound(torch.ones(64), torch.full((64,), -2.0)) == pytest.approx(1.02 * 2 * 8 * 1.4426950)


@pytest.mark.parametrize("name", ["auto", "sdpa-flash", "sdpa-math"])
@pytest.mark.parametrize("mask", [None, MASK], ids=["all keys", "some keys, and none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_kernel_takes_queries_that_carry_the_factor(name: str, mask, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 4, 8, generator=draw, dtype=dtype) for n in (5, 7, 7))
    expected = attention(q, k, v, mask)
    scaled = q * exponents.factor(8)
    out, lse = LocalAttend(name).with_lse(Role.VISUAL_SELF, scaled, k, v, mask, bound=30.0)
    assert_close(out, lse, expected, v, dtype)
    own = scaled[:, :4], k[:, :4], v[:, :4]
    mask = None if mask is None else mask[:, :4]
    attended = unified_attention(*own, Plan(Place(), (4,)), key_mask_BS=mask, kernel=name, return_lse=True, bound=30.0)
    expected = attention(q[:, :4], k[:, :4], v[:, :4], mask)
    assert_close(attended.out_BsHK, attended.lse_BsH, expected, v, dtype)


def test_auto_takes_the_kernel_without_a_maximum_where_the_bound_allows_it(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "KERNELS", HOPPER)
    long = need(CUDA, queries=51_840, keys=51_840)
    assert kernels.pick("auto", long._replace(bound=12.0)).name == "bounded"
    assert kernels.pick("auto", long).name == "fa3"
    assert kernels.pick("auto", long._replace(bound=exponents.MOST + 1)).name == "fa3"
    assert kernels.pick("auto", long._replace(bound=12.0, queries=225)).name == "fa3"
    assert kernels.pick("auto", long._replace(bound=12.0, keys=200)).name == "sdpa-cudnn"
    assert kernels.pick("auto", long._replace(bound=12.0, masked=True)).name == "fa3"
    assert kernels.bounds_pay(CUDA, torch.bfloat16, 64)
    assert not kernels.bounds_pay(CUDA, torch.float16, 64)
    assert not kernels.bounds_pay(CUDA, torch.bfloat16, 32)


def test_nobody_asks_for_a_bound_on_a_cpu() -> None:
    assert not kernels.bounds_pay(torch.device("cpu"), torch.bfloat16, 64)


def test_a_bound_that_is_missing_or_too_large_is_told(monkeypatch) -> None:
    monkeypatch.setattr(kernels, "KERNELS", HOPPER)
    with pytest.raises(KernelError, match=r"kernel bounded needs scores with a known bound; use fa3 or sdpa-cudnn\."):
        kernels.pick("bounded", need(CUDA))
    with pytest.raises(KernelError, match=r"bounded takes scores up to 2\^90, not 2\^91; use fa3 or sdpa-cudnn\."):
        kernels.pick("bounded", need(CUDA)._replace(bound=91.0))
    assert kernels.KERNELS[0].core is bounded


@pytest.mark.parametrize("lse", [False, True])
def test_the_kernel_is_one_operator_that_a_trace_counts_as_attention(lse: bool) -> None:
    """Played on tensors that have only a shape: what a compiler sees."""
    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.namespace)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(), Watching():
        q, k = (torch.empty(2, n, 3, 64, dtype=torch.bfloat16, device="cuda") for n in (5, 7))
        seen.clear()
        out, sums = bounded(q, k, k, None, lse, 1.0)
    assert seen[0] == "diptych_attention"
    assert (out.shape, out.dtype, out.device.type) == (q.shape, torch.bfloat16, "cuda")
    assert (None if sums is None else (sums.shape, sums.dtype)) == ((q.shape[:3], torch.float32) if lse else None)


@pytest.mark.parametrize(
    ("version", "told"),
    [
        ("3.6.0", None),
        ("3.8.0+git1", None),
        ("3.7rc1", None),
        ("3.5.1", "3.5.1 is not one of 3.6 to 3.8"),
        ("4.0.0", "4.0.0 is not"),
    ],
)
def test_a_triton_whose_gluon_is_another_is_left_alone(version: str, told: str | None, monkeypatch) -> None:
    """Gluon is experimental: a kernel that does not compile would end a clip in the middle."""
    pytest.importorskip("triton.experimental.gluon")
    monkeypatch.setattr("triton.__version__", version)
    refusal = cores.gluon_refusal.__wrapped__()
    assert refusal is None if told is None else told in refusal


def test_without_triton_others_attend(monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    assert cores.gluon_refusal.__wrapped__() == "Triton with Gluon is not installed"
