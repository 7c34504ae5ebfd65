"""Merging parts of an attention, also where a part sees no key: in plain torch, and by the kernel.

Where there is no GPU, the kernel runs through Triton's interpreter: 10 ms a launch.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from attention_work import Case, attend_with_merge_kernel, own_rows, whole
from reference import LSE_TOLERANCE, assert_close, attention

from diptych.attention import NO_KEY, LocalAttend, Role
from diptych.attention import merge as merging
from diptych.attention.merge import Merger, Sums, fusible, merge

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter truncates to bf16
Parts = list[tuple[torch.Tensor, torch.Tensor]]
q, k, v = torch.randn(3, 2, 12, 2, 8, generator=torch.Generator().manual_seed(0)).unbind(0)


@pytest.fixture(params=["plain", "kernel"])
def how(request, monkeypatch) -> str:
    monkeypatch.setattr(merging, "fusible", lambda *_: request.param == "kernel")
    return request.param


@pytest.fixture
def both(monkeypatch):
    """A function: the same parts merged in plain torch, and by the kernel."""

    def run(parts: Parts, dtype: torch.dtype) -> list[tuple[torch.Tensor, torch.Tensor]]:
        results = []
        for can in (False, True):
            with monkeypatch.context() as patched:
                patched.setattr(merging, "fusible", lambda *_, can=can: can)
                results.append(merge(parts, dtype))
        return results

    return run


def parts(mask: torch.Tensor, count: int) -> Parts:
    chunks = zip(k.chunk(count, 1), v.chunk(count, 1), mask.chunk(count, 1), strict=True)
    return [tuple(x.to(DEVICE) for x in LocalAttend().with_lse(Role.VISUAL_SELF, q, *chunk)) for chunk in chunks]


def drawn(count: int, *shape: int, dtype: torch.dtype = HALF) -> Parts:
    """Outputs (B, S, H, K), and log-sum-exps that lie as FlashAttention-3 returns them: (B, H, S), transposed."""
    generator = torch.Generator().manual_seed(count)
    B, S, H, _ = shape
    made = [(torch.randn(shape, generator=generator), torch.randn(B, H, S, generator=generator)) for _ in range(count)]
    return [(out.to(DEVICE, dtype), (4 * lse).to(DEVICE).transpose(1, 2)) for out, lse in made]


def test_dead_parts_first_middle_last_and_in_any_order(how: str) -> None:
    """The shorter recurrence fails from three parts on, and only where the first is dead."""
    for dead in itertools.product([False, True], repeat=4):
        mask = torch.ones(2, 12, dtype=torch.bool)
        for part, is_dead in enumerate(dead):
            mask[:, 3 * part : 3 * part + 3] = not is_dead
        expected, expected_lse = attention(q, k, v, mask)
        given = parts(mask, 4)
        turned = [given[n:] + given[:n] for n in range(4)]
        for order in itertools.permutations(given) if how == "plain" else turned:
            out, lse = (x.cpu() for x in merge(order, torch.float32))
            assert float((out - expected).abs().max()) <= 1e-6
            if all(dead):
                assert not out.any()
                assert (lse <= NO_KEY * 0.99).all()
            else:
                assert float((lse - expected_lse).abs().max()) <= 2e-6


def test_a_dead_part_changes_no_bit(how: str) -> None:
    alive = parts(torch.ones(2, 12, dtype=torch.bool), 1)[0]
    dead = (torch.full_like(alive[0], 7.0), torch.full_like(alive[1], NO_KEY))
    for order in ([alive], [alive, dead], [dead, alive], [dead, alive, dead]):
        out, lse = merge(order, torch.float32)
        assert torch.equal(out, alive[0])
        assert torch.equal(lse, alive[1])


def test_scores_too_large_for_exp_are_no_trouble(how: str) -> None:
    big = [(out, lse + 1e4) for out, lse in parts(torch.ones(2, 12, dtype=torch.bool), 3)]
    out, _ = merge(big, torch.float32)
    assert float((out.cpu() - attention(q, k, v)[0]).abs().max()) <= 1e-3  # float32 holds 1e4 to about 1e-3


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("shape", [(2, 53, 5, 16), (1, 3, 2, 12)], ids=["more rows than one program's", "K = 12"])
def test_the_kernel_equals_plain_torch(both, count: int, shape: tuple[int, ...]) -> None:
    given = drawn(count, *shape)
    (want, want_lse), (got, got_lse) = both(given, HALF)
    assert got.dtype == HALF and got.shape == want.shape
    torch.testing.assert_close(got.float(), want.float(), rtol=torch.finfo(HALF).eps, atol=1e-6)
    assert (got != want).float().mean() < 0.01, "more than the last bit of a few values"
    torch.testing.assert_close(got_lse, want_lse, rtol=0, atol=LSE_TOLERANCE[torch.float32])
    exact, exact_lse = merge([(out.double(), lse.double()) for out, lse in given], torch.float64)
    torch.testing.assert_close(got.double(), exact, rtol=torch.finfo(HALF).eps, atol=1e-6)
    torch.testing.assert_close(got_lse.double(), exact_lse, rtol=0, atol=LSE_TOLERANCE[torch.float32])


def test_float32_parts_keep_float32(both) -> None:
    (want, _), (got, _) = both(drawn(3, 1, 7, 2, 16, dtype=torch.float32), torch.float32)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", [2, 3])
def test_equal_parts_give_equal_bits_however_they_lie(how: str, count: int) -> None:
    """Contiguous on one rank, as they came over the wire on another: each output with its log-sum-exp behind it."""
    given = drawn(count, 2, 7, 3, 16)
    wire = [torch.cat([out, out[..., :2]], -1)[..., :16] for out, _ in given]
    out, lse = merge(given, HALF)
    again, again_lse = merge([(x, lse.contiguous()) for x, (_, lse) in zip(wire, given, strict=True)], HALF)
    heads_first = [x.transpose(2, 3).contiguous().transpose(2, 3) for x in wire]
    third, _ = merge([(x, lse) for x, (_, lse) in zip(heads_first, given, strict=True)], HALF)
    assert torch.equal(out, again) and torch.equal(lse, again_lse) and torch.equal(out, third)


def test_the_kernel_keeps_one_sum_and_leaves_the_parts_alone(monkeypatch) -> None:
    monkeypatch.setattr(merging, "fusible", lambda *_: True)
    given = drawn(5, 1, 7, 2, 16)
    before = [(out.clone(), lse.clone()) for out, lse in given]
    merger, sums = Merger(len(given), HALF), []
    for part in given:
        merger.add(*part)
        sums.append(merger._sums.out_BSHK)
    assert sums[0] is given[0][0], "the first part needs no pass of its own"
    assert [x.dtype for x in sums[1:]] == [torch.float32] * 3 + [HALF]
    assert len({x.data_ptr() for x in sums[1:4]}) == 1
    for (out, lse), (kept, kept_lse) in zip(given, before, strict=True):
        assert torch.equal(out, kept) and torch.equal(lse, kept_lse)


def test_the_kernel_takes_what_it_can(monkeypatch) -> None:
    monkeypatch.setattr(merging, "from_ampere", lambda device: True)

    def can(x: torch.Tensor, first: torch.Tensor | None = None) -> bool:
        lse = x[..., 0].detach().float()
        return fusible(Sums(x.detach() if first is None else first, lse), x, lse)

    assert not can(torch.empty(1, 2, 3, 8, dtype=torch.bfloat16))
    with torch._subclasses.FakeTensorMode():
        on_gpu = torch.empty(1, 2, 3, 8, dtype=torch.bfloat16, device="cuda")
        assert all(can(x) for x in (on_gpu, on_gpu.half(), on_gpu.float()))
        assert not can(on_gpu.double())
        assert not can(on_gpu[:0])
        wanted = torch.empty_like(on_gpu).requires_grad_()
        assert not can(wanted)
        assert not can(on_gpu, first=wanted), "the gradient of a part that came before would be lost"
        with torch.no_grad():
            assert can(wanted)
        monkeypatch.setattr(merging, "from_ampere", lambda device: False)
        assert not can(on_gpu)


def test_a_gradient_goes_through_plain_torch() -> None:
    given = [(out.requires_grad_(), lse) for out, lse in drawn(3, 1, 3, 2, 8, dtype=torch.float32)]
    out, lse = merge(given, torch.float32)
    out.sum().backward()
    for part, part_lse in given:
        torch.testing.assert_close(part.grad, (part_lse - lse).exp()[..., None].expand_as(part), rtol=1e-5, atol=1e-6)


def test_float64_stays_float64() -> None:
    given = [(out.double(), lse.double()) for out, lse in drawn(3, 1, 5, 2, 8)]
    out, lse = merge(given, torch.float64)
    assert (out.dtype, lse.dtype) == (torch.float64, torch.float64)
    weights = torch.stack([lse for _, lse in given]).softmax(0)[..., None]
    torch.testing.assert_close(
        out, sum(w * x for w, (x, _) in zip(weights, given, strict=True)), rtol=1e-13, atol=1e-13
    )


@pytest.mark.distributed
@pytest.mark.skipif(torch.cuda.is_available(), reason="the ranks hold CPU tensors, which only the interpreter takes")
@pytest.mark.parametrize("where", [None, "front"])
def test_a_ring_on_the_kernel_equals_one_process(ranks, where: str | None) -> None:
    """Three sources, uneven, one of them all masked; joint rows have the same bits on every rank."""
    mask = ((True, False, True, False, False, False, True, True, True),)
    case = Case(3, 1, (3, 3, 3), where=where, joint=2 if where else 0, mask=mask)
    tensors = whole(case)
    q, k, v, joined_mask = tensors.joined(case)
    expected = attention(q, k, v, joined_mask)
    J = case.joint
    results = ranks(3)(attend_with_merge_kernel, case)
    for rank, result in enumerate(results):
        assert result["merged by the kernel"] == (2 if where is None else 5)
        rows = [J + row for row in own_rows(case, rank)]
        assert_close(result["out"], result["lse"], tuple(x[:, rows] for x in expected), v, case.dtype)
        if where is not None:
            assert_close(result["joint"], result["joint_lse"], tuple(x[:, :J] for x in expected), v, case.dtype)
            assert torch.equal(result["joint"], results[0]["joint"])


def test_the_kernel_is_part_of_one_graph() -> None:
    """As torch.compile(fullgraph=True) traces it for a GPU, on any machine: a launch a merge, and no more."""
    script = Path(__file__).with_name("merge_graph.py")
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    assert json.loads(run.stdout) == {"graphs": 1, "launches": 2, "other arithmetic": []}
