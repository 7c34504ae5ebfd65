"""The fast decoder equals diffusers': through Triton's interpreter on a CPU, in float32, so that nothing hides."""

from __future__ import annotations

import pytest
import torch
from diffusers import AutoencoderKLHunyuanVideo
from torch import nn
from torch.nn import functional as F

from diptych.codecs import vae_fast
from diptych.codecs.conv3d import conv3d, pack
from diptych.codecs.group_norm import group_norm
from diptych.codecs.tiles import GIB, plan_tiles
from diptych.codecs.vae_cpu import OneDnnConv3d

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def padded_conv(x_TYXC: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    k = weight.shape[2] // 2
    padded = F.pad(x_TYXC.permute(3, 0, 1, 2)[None], (k, k, k, k, 2 * k, 0), mode="replicate")
    return F.conv3d(padded, weight, bias)[0].permute(1, 2, 3, 0)


@pytest.mark.parametrize("channels", [(16, 32), (32, 3)], ids=["wider", "to three colours"])
def test_causal_convolution_with_replicate_padding(channels):
    C, N = channels
    x, weight, bias = torch.randn(3, 4, 5, C), torch.randn(N, C, 3, 3, 3) * 0.1, torch.randn(N)
    residual = torch.randn(3, 4, 5, N)
    got = conv3d(x.to(DEVICE), pack(weight.to(DEVICE), bias.to(DEVICE)), residual.to(DEVICE))
    torch.testing.assert_close(got.cpu(), padded_conv(x, weight, bias) + residual, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("up", [(1, 2), (2, 2)], ids=["space", "time and space"])
def test_upsampling_is_folded_into_the_convolution(up):
    """The first frame stands once, later ones twice: what nearest neighbour and causal padding make of it."""
    x, weight, bias = torch.randn(3, 2, 3, 16), torch.randn(16, 16, 3, 3, 3) * 0.1, torch.randn(16)
    wide = x.repeat_interleave(2, 1).repeat_interleave(2, 2)
    if up[0] == 2:
        wide = torch.cat([wide[:1], wide[1:].repeat_interleave(2, 0)])
    got = conv3d(x.to(DEVICE), pack(weight.to(DEVICE), bias.to(DEVICE), up))
    torch.testing.assert_close(got.cpu(), padded_conv(wide, weight, bias), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("rows", [7, 300])
def test_group_norm_with_silu(rows):
    norm = nn.GroupNorm(4, 16)
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    x = torch.randn(1, rows, 2, 16) * 3 + 50  # a mean far from zero, where sums of squares would lose everything
    want = F.silu(norm(x.permute(3, 0, 1, 2)[None]))[0].permute(1, 2, 3, 0)
    with torch.no_grad():
        got = group_norm(x.to(DEVICE), norm.to(DEVICE), silu=True)
    torch.testing.assert_close(got.cpu(), want.detach(), atol=2e-4, rtol=1e-4)


def test_decoder_equals_diffusers():
    vae = AutoencoderKLHunyuanVideo(block_out_channels=(16, 16, 16, 32), norm_num_groups=4, layers_per_block=1).eval()
    vae.requires_grad_(False)
    for parameter in vae.decoder.parameters():
        if parameter.ndim == 1:
            nn.init.normal_(parameter, std=0.5)
        else:
            parameter.data *= 2.0
    vae.to(DEVICE)
    latents = torch.randn(1, 16, 2, 1, 2, device=DEVICE)
    with torch.no_grad():
        want = vae.decoder(latents)
        got = vae_fast.FastDecoder(vae.decoder)(latents)
    assert want.std() > 0.1, "the reference must say something"
    torch.testing.assert_close(got, want, atol=2e-4, rtol=1e-3)


def test_a_smaller_budget_cuts_the_picture():
    """The measured peak of 9.23 GiB is the plan's; half of that cuts it once."""
    with torch.device("meta"):
        released = AutoencoderKLHunyuanVideo()
    cost = vae_fast.FastDecoder(released.decoder).cost
    assert cost.peak(5, 60, 108, 480, 864) == pytest.approx(9.23 * GIB, rel=0.01)
    assert len({(tile.y, tile.x) for tile in plan_tiles(32, 60, 108, 6 * GIB, cost).tiles}) == 2
    assert len({(tile.y, tile.x) for tile in plan_tiles(32, 60, 108, 16 * GIB, cost).tiles}) == 1


def test_stays_stock_where_the_kernels_cannot_run():
    vae = AutoencoderKLHunyuanVideo(block_out_channels=(16, 16, 32, 32), norm_num_groups=4, layers_per_block=1)
    stock = vae.decoder
    assert vae_fast.fuse(vae).decoder is stock  # on the CPU


def test_on_a_cpu_the_same_pixels_come_from_onednn():
    """Small inputs would go to another kernel; upsampling, strides and shortcuts are all in it."""
    sizes = {"block_out_channels": (8, 8, 16, 16), "layers_per_block": 1, "norm_num_groups": 4}
    vae = AutoencoderKLHunyuanVideo(**sizes)
    z, x = torch.randn(1, 16, 2, 4, 6), torch.randn(1, 3, 5, 8, 12)
    with torch.no_grad():
        want = vae.decoder(z), vae.encoder(x)
        assert vae_fast.fuse(vae) is vae
        got = vae.decoder(z), vae.encoder(x)
    assert all(isinstance(m, OneDnnConv3d) for m in vae.modules() if isinstance(m, nn.Conv3d))
    torch.testing.assert_close(got, want, rtol=0, atol=2e-5)
    half = AutoencoderKLHunyuanVideo(
        block_out_channels=(8, 8, 16, 16), layers_per_block=1, norm_num_groups=4
    ).bfloat16()
    assert not any(isinstance(m, OneDnnConv3d) for m in vae_fast.fuse(half).modules())
