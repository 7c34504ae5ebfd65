"""Queries that are not finished: who finishes them, and who takes the kernel that does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_kernels import CUDA, need
from torch._subclasses import FakeTensorMode

from diptych.attention import LocalAttend, Role, exponents, kernels
from diptych.attention.place import Place
from diptych.attention.queries import HELD, Queries
from diptych.errors import KernelError
from diptych.model import plain
from diptych.model.ops import RMS_NORM_EPS
from diptych.parallel.sequence import SequenceAttend, TokenShard
from few_keys import FewKeys

K = 8
SCALE = exponents.factor(K)


def unfinished(x: torch.Tensor, weight: torch.Tensor, fp8_scale: torch.Tensor | None = None) -> Queries:
    def make() -> torch.Tensor:
        return plain.norm_rotate(x, weight, None, SCALE)

    return Queries(x, weight, SCALE, RMS_NORM_EPS, make, fp8_scale)


@pytest.fixture
def drawn() -> tuple[torch.Tensor, ...]:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, n, 3, K, generator=draw) * 3 for n in (6, 5, 5))
    weight = 1 + 0.3 * torch.randn(K, generator=draw)
    return q, plain.norm_rotate(k, weight, None), v, weight


@pytest.fixture
def few_keys(monkeypatch) -> FewKeys:
    few = FewKeys()
    monkeypatch.setattr(kernels, "KERNELS", few.kernels)
    return few


@pytest.mark.parametrize("attend", [LocalAttend(), SequenceAttend(TokenShard(6, Place()))], ids=["one rank", "a shard"])
def test_a_kernel_that_finishes_queries_gets_them_as_they_are(attend, drawn, few_keys) -> None:
    q, k, v, weight = drawn
    queries = unfinished(q, weight)
    want = LocalAttend("sdpa-math")(Role.VISUAL_TEXT, queries.made(), k, v, bound=12.0)
    assert torch.equal(attend(Role.VISUAL_TEXT, queries, k, v, bound=12.0), want)
    assert few_keys.seen == [queries]
    assert torch.equal(attend(Role.VISUAL_TEXT, queries.made(), k, v, bound=12.0), want), "finished ones as well"


@pytest.mark.parametrize("attend", [LocalAttend("sdpa-math"), SequenceAttend(TokenShard(6, Place()))], ids=type)
def test_everybody_else_gets_them_made(attend, drawn, few_keys) -> None:
    """A kernel named by the user; a mask; roles whose tensors travel or are merged."""
    q, k, v, weight = drawn
    queries = unfinished(q, weight, torch.tensor(1.0))
    mask = torch.arange(5).expand(2, 5) < 4
    for role, keys in ((Role.VISUAL_TEXT, 5), (Role.VISUAL_SELF, 6), (Role.AUDIO_FROM_VIDEO, 5)):
        k_all, v_all = (torch.cat([x, x[:, : keys - 5]], 1) for x in (k, v))
        seen = torch.cat([mask, mask[:, : keys - 5]], 1)
        out = attend(role, queries, k_all, v_all, seen, bound=12.0)
        want = LocalAttend("sdpa-math")(role, queries.made(), k_all, v_all, seen, bound=12.0)
        torch.testing.assert_close(out, want)
        assert out.dtype == q.dtype, "to ask for e4m3 does not mean to get it"
    assert not few_keys.seen


def test_results_in_e4m3_are_within_its_rounding(drawn, few_keys) -> None:
    q, k, v, weight = drawn
    scale = plain.common_scale(v)
    out = LocalAttend()(Role.VISUAL_TEXT, unfinished(q, weight, scale), k, v, bound=12.0)
    want = LocalAttend()(Role.VISUAL_TEXT, unfinished(q, weight), k, v, bound=12.0)
    assert out.dtype == torch.float8_e4m3fn and torch.isfinite(out.float()).all()
    torch.testing.assert_close(out.float() * scale, want, rtol=2.0**-4, atol=float(scale) * 2.0**-9)
    assert float(want.abs().max()) <= 448 * scale


@pytest.mark.parametrize("sizes", [(0, 5), (6, 0)], ids=["no queries", "no keys"])
def test_empty_input_is_legal(sizes: tuple[int, int], drawn, few_keys) -> None:
    q, k, v, weight = drawn
    q, k, v = q[:, : sizes[0]], k[:, : sizes[1]], v[:, : sizes[1]]
    out = LocalAttend()(Role.VISUAL_TEXT, unfinished(q, weight, torch.tensor(1.0)), k, v, bound=12.0)
    assert out.shape == q.shape and not out.any() and not few_keys.seen


def test_queries_that_nobody_can_finish_are_a_mistake(drawn) -> None:
    q, _, _, weight = drawn
    assert Queries(q).made() is q
    with pytest.raises(AssertionError, match="who normalises them"):
        Queries(q, weight).made()


def test_auto_takes_it_for_many_queries_and_few_keys(monkeypatch) -> None:
    hopper = tuple(replace(kernel, usable=None) for kernel in kernels.KERNELS)
    monkeypatch.setattr(kernels, "KERNELS", hopper)
    short = need(CUDA, queries=51_840, keys=200, head_dim=128)._replace(bound=12.0)
    assert kernels.fuses(short)
    assert kernels.pick("auto", short).name == "bounded-short"
    assert kernels.pick("auto", short._replace(head_dim=64, keys=512)).name == "bounded-short"
    others = {"queries": 225}, {"keys": 257}, {"bound": None}, {"masked": True}, {"lse": True}, {"head_dim": 32}
    for other in others:
        assert kernels.pick("auto", short._replace(**other)).name == "sdpa-cudnn", other
        assert not kernels.fuses(short._replace(**other))
    assert kernels.pick("auto", short._replace(keys=51_840)).name == "bounded"
    with pytest.raises(KernelError, match="bounded-short holds 256 keys, not 257; use "):
        kernels.pick("bounded-short", short._replace(keys=257))
    assert HELD == 256 * 128


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_the_kernel_is_one_operator(dtype: torch.dtype) -> None:
    """Played on tensors that have only a shape: what a compiler sees."""
    short_kernel = pytest.importorskip("diptych.attention.short_kernel")
    with FakeTensorMode():
        q, k = (torch.empty(2, n, 3, 64, dtype=torch.bfloat16, device="cuda") for n in (5, 7))
        scale = None if dtype == torch.bfloat16 else torch.ones((), device="cuda")
        out = short_kernel.attention(Queries(q, fp8_scale=scale), k, k)
    assert (out.shape, out.dtype, out.device.type) == (q.shape, dtype, "cuda")


@pytest.mark.parametrize("tiles", [1, 2, 13, 34, 270])
@pytest.mark.parametrize("heads", [1, 3, 28, 32])
def test_programs_share_the_queries(tiles: int, heads: int) -> None:
    """All tiles, each once; and nearly as soon as if they could be dealt one by one."""
    short_kernel = pytest.importorskip("diptych.attention.short_kernel")
    programs, each = short_kernel.shares(tiles, heads, 132)
    assert (programs - 1) * each < tiles <= programs * each
    rounds = -(-programs * heads // 132)
    assert rounds * (each + 1) <= 1.15 * (tiles * heads / 132 + 2)
