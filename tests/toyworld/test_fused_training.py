"""The kernels of the training step: values and gradients are those of torch's own operations."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton")

from tools.toyworld import fast_flow, fast_vae, fused, fused_vae


def held(got: Callable[..., Tensor], want: Callable[..., Tensor], *inputs: Tensor) -> None:
    """Compare values, and the gradient of every input, in float32."""
    results = []
    for function in (got, want):
        own = [x.clone().requires_grad_() for x in inputs]
        out = function(*own)
        weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        results.append((out, torch.autograd.grad((out * weight).sum(), own)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def modulation(n: int) -> tuple[Tensor, ...]:
    """Views of one row a clip, as the modulation layers hand them out."""
    return torch.randn(2, 1, 3 * n).chunk(3, dim=-1)


@pytest.mark.parametrize("turned", [True, False])
def test_heads_are_normed_and_turned(turned: bool) -> None:
    angles = torch.randn(70, 16)
    rope = (angles.cos(), angles.sin()) if turned else None

    def transposed(do: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, w: do(x, w, rope).transpose(1, 2).contiguous()  # gradients come back in another order

    held(
        transposed(fused.norm_turn), transposed(fast_flow._Plain.norm_turn), torch.randn(2, 70, 1, 32), torch.randn(32)
    )


@pytest.mark.parametrize("name", ["scaled", "gated"])
@pytest.mark.parametrize("D", [16, 24])
def test_streams_are_shifted_scaled_and_gated(name: str, D: int) -> None:
    x, (a, b, _) = torch.randn(2, 45, D) + 3, modulation(D)
    inputs = (x, a, b) if name == "scaled" else (x, torch.randn_like(x), b)
    held(getattr(fused, name), getattr(fast_flow._Plain, name), *inputs)


def test_a_linear_layer_sums_its_bias_gradient() -> None:
    held(fused.linear, fast_flow._Plain.linear, torch.randn(2, 600, 8), torch.randn(70, 8), torch.randn(70))


def test_parameters_are_cast_at_once_and_gradients_come_back_wide() -> None:
    weights = [nn.Parameter(torch.randn(3, 4)) for _ in range(3)]
    out = fused.cast(list(weights), torch.bfloat16)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(out, weights, strict=True))
    (2 * out[0].sum() + 3 * out[2].sum()).backward()
    assert weights[0].grad is not None and weights[0].grad.dtype is torch.float32 and weights[0].grad.unique() == 2
    assert weights[1].grad is None
    assert weights[2].grad is not None and weights[2].grad.unique() == 3


@pytest.mark.parametrize("silu", [True, False])
def test_the_vaes_norm_is_torchs(silu: bool) -> None:
    def stock(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        y = F.group_norm(x.movedim(-1, 1), 2, weight, bias, 1e-6).movedim(1, -1)
        return F.silu(y) if silu else y

    def ours(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        out: Tensor = fused_vae._Norm.apply(x, weight, bias, 2, 1e-6, silu)
        return out

    held(ours, stock, torch.randn(2, 3, 5, 5, 6) + 1, torch.randn(6), torch.randn(6))


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("T", [1, 2, 5])
def test_a_causal_convolution_reads_the_same_taps(T: int, stride: int) -> None:
    def stock(x: Tensor) -> Tensor:
        return F.pad(fast_vae._Taps.apply(fast_vae._Edge.apply(x), stride), (0, 7))

    held(lambda x: fused_vae.taps(x, stride), stock, torch.randn(2, T, 2, 3, 3))
