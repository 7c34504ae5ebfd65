"""The decoder of the video VAE on channels-last frames, with the weights of diffusers' module.

`fuse(vae)` puts it in the place of `vae.decoder`; inputs, outputs and parameters' names stay what they are. On a CPU it
only picks the kernels of the convolutions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diptych.codecs.tiles import TileCost, fused_cost
from diptych.codecs.vae_cpu import speed_up
from diptych.model.ops import runs_kernels


def fusible(vae: Any) -> bool:
    """Whether the kernels can run: half precision on a GPU from Ampere on, channels in powers of two from 16 on."""
    device = next(vae.decoder.parameters()).device
    widths = vae.config.block_out_channels
    powers_of_two = all(width >= 16 and width & (width - 1) == 0 for width in widths)
    return runs_kernels(device) and vae.dtype in (torch.float16, torch.bfloat16) and powers_of_two


def fuse(vae: Any) -> Any:
    """Replace `vae.decoder` by its fast form, if that can run; returns the same `vae`."""
    if fusible(vae) and not isinstance(vae.decoder, FastDecoder):
        vae.decoder = FastDecoder(vae.decoder)
    return speed_up(vae)


class FastDecoder(nn.Module):
    """diffusers' `HunyuanVideoDecoder3D`, computed by convolution kernels that neither pad nor upsample in memory.

    Takes latents (1, C, T, Y, X) and returns pixels (1, 3, F, H, W) in their dtype. The result differs from diffusers'
    in rounding only.
    """

    def __init__(self, decoder: Any) -> None:
        super().__init__()
        from diptych.codecs.conv3d import Packed

        self.decoder = decoder
        self._packed: dict[str, Packed] = {}

    def release(self) -> None:
        """Let go of the weights in the order that the kernels want; they are made again when they are needed."""
        self._packed.clear()

    @property
    def cost(self) -> TileCost:
        """Peak bytes of a tile."""
        return fused_cost(self.decoder.up_blocks[-1].resnets[0].norm1.num_channels)

    @torch.no_grad()
    def forward(self, latents_BCTYX: Tensor) -> Tensor:
        return torch.stack([self._one(latents_CTYX) for latents_CTYX in latents_BCTYX])

    def _one(self, latents_CTYX: Tensor) -> Tensor:
        d = self.decoder
        x = self._conv("conv_in", latents_CTYX.permute(1, 2, 3, 0).contiguous())
        mid = d.mid_block
        x = self._resnet("mid_block.resnets.0", mid.resnets[0], x)
        for index, attention in enumerate(mid.attentions):
            if attention is not None:
                x = causal_attention(x, attention)
            x = self._resnet(f"mid_block.resnets.{index + 1}", mid.resnets[index + 1], x)
        for level, block in enumerate(d.up_blocks):
            for index, resnet in enumerate(block.resnets):
                x = self._resnet(f"up_blocks.{level}.resnets.{index}", resnet, x)
            for index, upsampler in enumerate(block.upsamplers or ()):
                factors = upsampler.upsample_factor
                up = (int(factors[0]), int(factors[1]))
                x = self._conv(f"up_blocks.{level}.upsamplers.{index}.conv", x, up=up)
        x = self._norm(d.conv_norm_out, x)
        return self._conv("conv_out", x).permute(3, 0, 1, 2)

    def _resnet(self, name: str, resnet: Any, x: Tensor) -> Tensor:
        y = self._conv(f"{name}.conv1", self._norm(resnet.norm1, x))
        y = self._norm(resnet.norm2, y)
        residual = x if resnet.conv_shortcut is None else self._conv(f"{name}.conv_shortcut", x)
        return self._conv(f"{name}.conv2", y, residual)

    def _norm(self, norm: nn.GroupNorm, x: Tensor) -> Tensor:
        from diptych.codecs.group_norm import group_norm

        return group_norm(x, norm, silu=True)

    def _conv(self, name: str, x: Tensor, residual: Tensor | None = None, up: tuple[int, int] = (1, 1)) -> Tensor:
        from diptych.codecs.conv3d import conv3d, pack

        if name not in self._packed:
            conv = self.decoder.get_submodule(name).conv
            self._packed[name] = pack(conv.weight, conv.bias, up)
        return conv3d(x, self._packed[name], residual)


def causal_attention(x_TYXC: Tensor, attention: Any) -> Tensor:
    """The middle attention, one head: a pixel sees all pixels of its own and earlier frames.

    Frame by frame without a mask, so nothing that cannot be seen is computed.
    """
    T, Y, X, C = x_TYXC.shape
    assert attention.heads == 1
    x = x_TYXC.reshape(T * Y * X, C)
    normed = F.group_norm(
        x.T[None],
        attention.group_norm.num_groups,
        eps=attention.group_norm.eps,
        weight=attention.group_norm.weight,
        bias=attention.group_norm.bias,
    )[0].T
    q, k, v = attention.to_q(normed), attention.to_k(normed), attention.to_v(normed)
    out = torch.empty_like(q)
    size = Y * X
    for frame in range(T):
        own, seen = slice(frame * size, (frame + 1) * size), slice(0, (frame + 1) * size)
        out[own] = _one_head(q[own], k[seen], v[seen])
    added: Tensor = attention.to_out[0](out) + x
    return added.view(T, Y, X, C)


def _one_head(q_SC: Tensor, k_SC: Tensor, v_SC: Tensor) -> Tensor:
    """Softmax attention with a head too wide for flash kernels: plain products, scores in float32."""
    if q_SC.is_cuda:
        scores = torch.mm(q_SC, k_SC.T, out_dtype=torch.float32)
    else:
        scores = q_SC.float() @ k_SC.float().T
    weights = torch.softmax(scores * q_SC.shape[1] ** -0.5, dim=-1).to(v_SC.dtype)
    return weights @ v_SC
