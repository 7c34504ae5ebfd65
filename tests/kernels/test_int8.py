"""Attention in int8: the kernel that rounds equals its twin, what rounding costs, and who takes it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

from diptych.attention import APPROXIMATE, LocalAttend, Need, Role, exponents, int8, kernels
from diptych.attention.quantise import blocks
from diptych.bench.forward import relative

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16 if torch.cuda.is_available() else torch.float16


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def wide(x: int8.Rounded) -> torch.Tensor:
    """What the integers stand for: the input, turned."""
    scale = x.scale.repeat_interleave(int8.TOKENS, 2)[:, :, : x.values.shape[1]]
    return x.values.float() * scale.transpose(1, 2).unsqueeze(-1)


@pytest.mark.parametrize("tokens", [1, 64, 150])
def test_one_pass_turns_and_rounds_as_the_twin_does(tokens: int) -> None:
    """Every 64 tokens of a head by their own largest; a view whose tokens lie further apart than their heads."""
    whole = (draw(2, tokens, 2, 3, 32) * (1 + 9 * draw(2, tokens, 1, 1, 1).abs())).to(HALF).to(DEVICE)
    x = whole[:, :, 0]
    want = int8.rounded_plainly(x)
    values, scale = blocks(x, int8.signs(32, DEVICE).to(HALF))
    assert values.dtype == torch.int8 and values.is_contiguous()
    assert scale.shape == (2, 3, -(-tokens // 64))
    torch.testing.assert_close(scale, want.scale, rtol=1e-5, atol=0)
    off = (values.int() - want.values.int()).abs()
    assert off.max() <= 1 and (off > 0).float().mean() < 0.01, "equal but for what lies between two steps"
    assert values.abs().amax() == 127


def test_zeros_stay_zeros() -> None:
    values, scale = blocks(torch.zeros(1, 70, 1, 32, dtype=HALF, device=DEVICE), int8.signs(32, DEVICE).to(HALF))
    assert not values.any() and (scale > 0).all() and torch.isfinite(scale).all()
    assert not int8.rounded_plainly(torch.zeros(1, 70, 1, 32)).values.any()


@pytest.mark.parametrize("K", [16, 64, 128])
def test_a_turn_is_one_and_spreads_what_channels_share(K: int) -> None:
    turn = int8.signs(K, CPU).float() / K**0.5
    torch.testing.assert_close(turn @ turn.T, torch.eye(K))
    spread = (torch.ones(K) @ turn).abs()
    assert spread.max() <= 2**0.5 + 1e-6, "of a constant no channel holds much more than another"


def test_turned_back_it_is_the_input_within_its_rounding() -> None:
    x = draw(1, 150, 2, 128)
    back = wide(int8.rounded_plainly(x)) @ int8.signs(128, CPU).float().T / 128**0.5
    assert relative(back, x) < 0.011, (
        "half a step of 127 to the largest of 8,192 values, which is about 4.2 times the rms"
    )


def test_a_turn_spares_what_few_large_channels_decide() -> None:
    """A channel twenty times the others: one scale for all rounds the others away; turned, they share it."""
    large = torch.ones(128)
    large[0] = 20
    q, k = (F.rms_norm(draw(1, 320, 2, 128, seed=seed) * large, (128,)) for seed in (1, 2))
    exact = torch.einsum("bqhk,bshk->bhqs", q, k)

    def straight(x: torch.Tensor) -> torch.Tensor:
        scale = x.abs().amax() / 127
        return (x / scale).round() * scale

    turned = [wide(int8.rounded_plainly(x)) for x in (q, k)]
    assert relative(torch.einsum("bqhk,bshk->bhqs", *turned), exact) < 0.02
    assert relative(torch.einsum("bqhk,bshk->bhqs", straight(q), straight(k)), exact) < 0.02
    small = [x[..., 1:] for x in (q, straight(q))]
    back = wide(int8.rounded_plainly(q)) @ int8.signs(128, CPU).float().T / 128**0.5
    assert relative(back[..., 1:], small[0]) < 0.5 * relative(small[1], small[0])


def test_what_rounding_costs_on_random_tensors() -> None:
    """Normalised as the model's are: values average out to little, so this is the hard case."""
    q, k = (F.rms_norm(draw(1, 4096, 2, 128, seed=seed), (128,)) for seed in (3, 4))
    v = draw(1, 4096, 2, 128, seed=5)
    exact = LocalAttend("sdpa-flash")(Role.VISUAL_SELF, q[:, :64], k, v)
    turned = [wide(int8.rounded_plainly(x)) for x in (q[:, :64], k)]
    assert 0.003 < relative(LocalAttend("sdpa-flash")(Role.VISUAL_SELF, *turned, v), exact) < 0.02


def test_an_approximation_is_taken_only_by_name_and_where_it_can(monkeypatch) -> None:
    able = replace(kernels.KERNELS[1], usable=None)
    assert able.name == "bounded-int8" and not able.exact
    monkeypatch.setattr(kernels, "KERNELS", (able, *kernels.KERNELS[2:]))
    need = Need(torch.device("cuda"), torch.bfloat16, 128, 9000, 9000, False, False, False, bound=20.0)
    name = APPROXIMATE[Role.VISUAL_SELF]
    assert kernels.pick(name, need) is able
    assert kernels.pick("auto", need).exact
    for other in ({"head_dim": 64}, {"bound": exponents.MOST + 1}, {"bound": None}, {"masked": True}):
        assert kernels.pick(name, need._replace(**other)).exact, f"what {other} rules out is computed exactly"
    q = draw(1, 5, 2, 128)
    exact = LocalAttend()(Role.VISUAL_SELF, q, q, q)
    assert torch.equal(LocalAttend(APPROXIMATE)(Role.VISUAL_SELF, q, q, q), exact)
    assert LocalAttend(APPROXIMATE).exact().kernels[Role.VISUAL_SELF] == "auto"


def test_signs_that_a_tracer_asked_for_are_not_kept(monkeypatch):
    monkeypatch.setattr(int8, "_SIGNS", {})
    with FakeTensorMode():
        int8.signs(32, CPU)
    with torch.inference_mode():
        kept = int8.signs(32, CPU)
    assert type(kept) is torch.Tensor and not kept.is_inference()
    assert int8.signs(32, CPU) is kept
