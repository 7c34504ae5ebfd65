"""Fused kernels equal their plain twins: through Triton's interpreter on a CPU, on the GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from diptych.model import plain
from diptych.model.kernels import adaln, rotate
from diptych.model.rope import rope_1d

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16  # the interpreter truncates to bf16
ULP = torch.finfo(HALF).eps  # a fused pass may round one value in a hundred the other way, nothing more


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def draw(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return (torch.randn(*shape) * 1.7 + 0.3).to(dtype).to(DEVICE)


def same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype and got.shape == want.shape
    torch.testing.assert_close(got.float(), want.float(), rtol=ULP, atol=1e-5)
    differing = (got != want).float().mean().item()
    assert differing < 0.01, f"{differing:.1%} of the values round differently"


@pytest.mark.parametrize("width", [80, 1792], ids=["tiny", "Lite: not a power of two"])
@pytest.mark.parametrize("B", [1, 2])
def test_residual_norm_and_modulation_in_one_pass(width, B):
    x, y = draw(B, 5, width), draw(B, 5, width)
    gate, shift, scale = draw(B, 3 * width, dtype=torch.float32).chunk(3, dim=-1)  # strided, as in the model
    same(adaln.scale_shift(x, shift, scale), plain.scale_shift(x, shift, scale))
    same(adaln.gated(x, y, gate), plain.gated(x, y, gate))
    for got, want in zip(
        adaln.gated_scale_shift(x, y, gate, shift, scale),
        plain.gated_scale_shift(x, y, gate, shift, scale),
        strict=True,
    ):
        same(got, want)


@pytest.mark.parametrize("rotated", [True, False])
@pytest.mark.parametrize(("heads", "K"), [(5, 16), (28, 64)], ids=["tiny", "Lite: 28 heads"])
def test_head_norm_and_rotation_in_one_pass(heads, K, rotated):
    q, k = draw(2, 7, heads, K), draw(2, 7, heads, K)
    rope = rope_1d(7, K, DEVICE) if rotated else None
    q_weight, k_weight = draw(K), draw(K)
    want_q, want_k = plain.norm_rotate(q, q_weight, rope), plain.norm_rotate(k, k_weight, rope)
    same(rotate.norm_rotate(q, q_weight, rope), want_q)
    got_q, got_k = rotate.norm_rotate_pair(q, k, q_weight, k_weight, rope)
    same(got_q, want_q)
    same(got_k, want_k)
    scaled_q, scaled_k = rotate.norm_rotate_pair(q, k, q_weight, k_weight, rope, q_scale=0.18)
    same(scaled_q, plain.norm_rotate(q, q_weight, rope, 0.18))
    same(scaled_k, want_k)
    same(rotate.norm_rotate(q, q_weight, rope, scale=0.18), scaled_q)


def test_heads_of_a_wider_projection_need_no_copy():
    """Queries as a view of a merged projection: tokens lie further apart than one token's heads."""
    wide = draw(1, 6, 3 * 5 * 16)
    q = wide[..., 80:160].unflatten(-1, (5, 16))
    weight = draw(16)
    same(rotate.norm_rotate(q, weight, None), plain.norm_rotate(q, weight, None))


def test_many_rows_in_one_program(monkeypatch):
    """Programs that walk over several rows write each of them, also where the last program has fewer."""
    monkeypatch.setattr(adaln, "tuning", lambda S, D, gated, normed, rows: {"ROWS": 4, "STEPS": 2, "num_warps": 1})
    monkeypatch.setattr(rotate, "tuning", lambda S, width: {"ROWS": 4, "num_warps": 1})
    x, y, gate, shift, scale = draw(2, 11, 48), draw(2, 11, 48), *draw(2, 144, dtype=torch.float32).chunk(3, dim=-1)
    same(adaln.scale_shift(x, shift, scale), plain.scale_shift(x, shift, scale))
    for got, want in zip(
        adaln.gated_scale_shift(x, y, gate, shift, scale),
        plain.gated_scale_shift(x, y, gate, shift, scale),
        strict=True,
    ):
        same(got, want)
    q, weight, rope = draw(1, 11, 3, 16), draw(16), rope_1d(11, 16, DEVICE)
    same(rotate.norm_rotate(q, weight, rope), plain.norm_rotate(q, weight, rope))


def test_what_is_its_own_is_written_over_with_the_same_bits():
    gate, shift, scale = draw(1, 3 * 80, dtype=torch.float32).chunk(3, dim=-1)
    y, weight, rope = draw(1, 6, 80), draw(16), rope_1d(6, 16, DEVICE)
    calls = [
        (lambda x, own: (adaln.gated(x, y, gate, own=own),), (80,), 1),
        (lambda x, own: adaln.gated_scale_shift(x, y, gate, shift, scale, own=own), (80,), 1),
        (lambda x, own: adaln.gated_scale_shift_rows(x, y, gate, shift, scale, own=own), (80,), 1),
        (lambda q, own: (rotate.norm_rotate(q, weight, rope, own=own),), (5, 16), 1),
        (lambda q, k, own: rotate.norm_rotate_pair(q, k, weight, weight, rope, own=own), (5, 16), 2),
    ]
    for call, shape, count in calls:
        inputs = [draw(1, 6, *shape) for _ in range(count)]
        given = [x.clone() for x in inputs]
        want = call(*given, own=False)
        assert all(torch.equal(x, before) for x, before in zip(given, inputs, strict=True))
        got = call(*given, own=True)
        for x, result, expected in zip(given, got, want, strict=False):
            assert result.data_ptr() == x.data_ptr() and torch.equal(result, expected)
