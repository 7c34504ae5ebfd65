"""Element-wise arithmetic on half-precision tokens: float32 inside, rounded once at the end."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from diptych.model import plain
from diptych.model.layers import LayerNorm32, Linear32, NormedLinear
from diptych.model.rope import rope_1d
from diptych.model.transformer import AudioHead

HALF = [torch.bfloat16, torch.float16]


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_norm_scale_shift_gate_and_rotation_round_once(dtype):
    x, y = draw(2, 7, 16, dtype=dtype), draw(2, 7, 16, dtype=dtype).flip(1)
    shift, scale, gate = draw(2, 16), draw(2, 16).flip(1), draw(2, 16).flip(0)
    wide = F.layer_norm(x.float(), (16,), eps=1e-5) * (scale[:, None] + 1) + shift[:, None]
    assert torch.equal(plain.scale_shift(x, shift, scale), wide.to(dtype))
    assert torch.equal(plain.gated(x, y, gate), (x.float() + gate[:, None] * y.float()).to(dtype))
    heads, weight, rope = draw(2, 7, 3, 8, dtype=dtype), draw(8, dtype=dtype), rope_1d(7, 8, torch.device("cpu"))
    assert rope.cos_SP.dtype is rope.sin_SP.dtype is torch.float32
    wide = plain.norm_rotate(heads.float(), weight.float(), rope)
    assert torch.equal(plain.norm_rotate(heads, weight, rope), wide.to(dtype))


@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_small_layers_compute_in_float32_whatever_they_store(dtype):
    for layer in (Linear32(16, 8), LayerNorm32(16), NormedLinear(16, 8)):
        for parameter in layer.parameters():
            parameter.data = draw(*parameter.shape)
        half = layer.to(dtype)
        out = half(draw(2, 16, dtype=dtype))
        assert out.dtype is torch.float32
        assert torch.equal(out, half.float()(draw(2, 16, dtype=dtype).float()))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@torch.no_grad()
def test_the_second_norm_of_the_audio_head_is_float32_on_the_rounded_tokens(dtype):
    head = AudioHead(16, 4, 5)
    head.out_layer.to(dtype)
    x, modulation = draw(2, 7, 16, dtype=dtype), draw(2, 32)
    once = plain.scale_shift(x, *modulation.chunk(2, dim=-1))
    twice = F.layer_norm(once.float(), (16,), eps=1e-5).to(dtype)
    assert torch.equal(head(x, modulation), head.out_layer(twice))
