"""The stock video VAE's arithmetic on its own weights, arranged for training: two-dimensional convolutions only.

cuDNN's three-dimensional convolutions are slow at few channels. A causal convolution over three frames is one
two-dimensional convolution over the three frames' channels side by side, which runs on the matrix units. Activations
are (B, T, H, W, C), channels last, in the dtype of the input; weights are cast to it where they are used, statistics
are float32. `tests/toyworld` holds the result to the stock module's.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.toyworld import fused_vae as fused

FUSED = True
"""Whether the kernels of `fused_vae` are used on a GPU."""


def _fused(x: Tensor) -> bool:
    return FUSED and x.is_cuda


def encode(vae: nn.Module, frames: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and log-variance (B, C, T, H, W), float32, of one window of frames (B, 3, F, H, W)."""
    part: Any = vae
    x = _conv(part.encoder.conv_in, frames.movedim(1, -1))
    for block in part.encoder.down_blocks:
        for resnet in block.resnets:
            x = _resnet(resnet, x)
        for down in block.downsamplers or ():
            x = _conv(down.conv, x)
    x = _middle(part.encoder.mid_block, x)
    x = _conv(part.encoder.conv_out, _norm(part.encoder.conv_norm_out, x))
    mean, log_variance = _point(part.quant_conv, x).movedim(-1, 1).float().chunk(2, dim=1)
    return mean, log_variance.clamp(-30, 20)


def decode(vae: nn.Module, z: Tensor) -> Tensor:
    """Frames (B, 3, F, H, W) of the latents of one window (B, C, T, H, W)."""
    part: Any = vae
    x = _conv(part.decoder.conv_in, _point(part.post_quant_conv, z.movedim(1, -1)))
    x = _middle(part.decoder.mid_block, x)
    for block in part.decoder.up_blocks:
        for resnet in block.resnets:
            x = _resnet(resnet, x)
        for up in block.upsamplers or ():
            x = _conv(up.conv, _enlarge(x, up.upsample_factor))
    x = _conv(part.decoder.conv_out, _norm(part.decoder.conv_norm_out, x))
    return x.movedim(-1, 1)


class _Edge(torch.autograd.Function):
    """Repeat the outermost rows and columns once around every picture."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        B, T, H, W, C = x.shape
        out = x.new_empty(B, T, H + 2, W + 2, C)
        out[:, :, 1:-1, 1:-1] = x
        out[:, :, 0, 1:-1], out[:, :, -1, 1:-1] = x[:, :, 0], x[:, :, -1]
        out[:, :, :, 0], out[:, :, :, -1] = out[:, :, :, 1], out[:, :, :, -2]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (g,) = grads
        rows = g[:, :, 1:-1, 1:-1].clone()
        for edge, own in ((0, 0), (-1, -1)):
            rows[:, :, own] += g[:, :, edge, 1:-1]
            column = g[:, :, 1:-1, edge].clone()
            column[:, :, 0] += g[:, :, 0, edge]
            column[:, :, -1] += g[:, :, -1, edge]
            rows[:, :, :, own] += column
        return rows


class _Taps(torch.autograd.Function):
    """Frames t - 2, t - 1 and t side by side in the channels, the first frame standing in for what is before it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, stride: int) -> Tensor:
        B, T, H, W, C = x.shape
        ctx.shape, ctx.stride = x.shape, stride
        out = x.new_empty(B, (T - 1) // stride + 1, H, W, 3 * C)
        for tap, back in enumerate((2, 1, 0)):
            for first, (to, of) in enumerate(_runs(T, stride, back)):
                out[:, to, ..., tap * C : (tap + 1) * C] = x[:, of] if first else x[:, :1]
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (g,) = grads
        T, C = ctx.shape[1], ctx.shape[4]
        out = torch.zeros(ctx.shape, dtype=g.dtype, device=g.device)
        for tap, back in enumerate((2, 1, 0)):
            part = g[..., tap * C : (tap + 1) * C]
            for first, (to, of) in enumerate(_runs(T, ctx.stride, back)):
                if first:
                    out[:, of] += part[:, to]
                else:
                    out[:, :1] += part[:, to].sum(1, keepdim=True)
        return out, None


def _runs(T: int, stride: int, back: int) -> tuple[tuple[slice, slice], tuple[slice, slice]]:
    """Which outputs read the repeated first frame, and which read which inputs."""
    held = min(-(-back // stride), (T - 1) // stride + 1)
    start = held * stride - back
    return (slice(0, held), slice(0, 1)), (slice(held, None), slice(start, max(T - back, start), stride))


def _conv(causal: nn.Module, x: Tensor) -> Tensor:
    """A `HunyuanVideoCausalConv3d`: the first frame repeats before the start, edges repeat around the picture."""
    conv: Any = getattr(causal, "conv", causal)
    if conv.kernel_size[0] == 1:
        return _point(conv, x)
    taps: Tensor = fused.taps(x, conv.stride[0]) if _fused(x) else _Taps.apply(_Edge.apply(x), conv.stride[0])
    B = taps.shape[0]
    flat, bias = conv.weight.movedim(2, 1).flatten(1, 2).to(x.dtype), conv.bias.to(x.dtype)
    # The matrix units want channels in eights; the picture's own three are padded with nothing.
    out_channels = flat.shape[0]
    more_in, more_out = -flat.shape[1] % 8, -out_channels % 8
    flat = F.pad(flat, (0, 0, 0, 0, 0, more_in, 0, more_out)).contiguous(memory_format=torch.channels_last)
    if taps.shape[-1] < flat.shape[1]:
        taps = F.pad(taps, (0, more_in))
    y = F.conv2d(taps.flatten(0, 1).permute(0, 3, 1, 2), flat, F.pad(bias, (0, more_out)), conv.stride[1:])
    return y.permute(0, 2, 3, 1)[..., :out_channels].contiguous().unflatten(0, (B, -1))


def _point(conv: nn.Module, x: Tensor) -> Tensor:
    kernel: Any = conv
    return F.linear(x, kernel.weight.flatten(1).to(x.dtype), kernel.bias.to(x.dtype))


def _norm(norm: nn.Module, x: Tensor, silu: bool = True) -> Tensor:
    """GroupNorm over all places and frames of a clip, and SiLU."""
    group: Any = norm
    if _fused(x):
        return fused.norm(group, x, silu)
    T, H, W, C = x.shape[1:]
    G, count = group.num_groups, T * H * W
    mean_BC = x.mean(dim=(1, 2, 3), dtype=torch.float32)
    square_BC = torch.linalg.vector_norm(x, dim=(1, 2, 3), dtype=torch.float32).square() / count
    mean = mean_BC.unflatten(1, (G, -1)).mean(2, keepdim=True)
    square = square_BC.unflatten(1, (G, -1)).mean(2, keepdim=True)
    inverse = torch.rsqrt((square - mean.square()).clamp(min=0) + group.eps)
    scale = (inverse * group.weight.unflatten(0, (G, -1))).flatten(1)
    shift = group.bias - mean.expand(-1, -1, C // G).flatten(1) * scale
    y = torch.addcmul(shift[:, None, None, None].to(x.dtype), x, scale[:, None, None, None].to(x.dtype))
    return F.silu(y) if silu else y


def _resnet(block: nn.Module, x: Tensor) -> Tensor:
    part: Any = block
    y = _conv(part.conv1, _norm(part.norm1, x))
    y = _conv(part.conv2, _norm(part.norm2, y))
    return y + (x if part.conv_shortcut is None else _conv(part.conv_shortcut, x))


def _middle(block: nn.Module, x: Tensor) -> Tensor:
    part: Any = block
    x = _resnet(part.resnets[0], x)
    for attention, resnet in zip(part.attentions, part.resnets[1:], strict=True):
        if attention is not None:
            x = x + _attention(attention, _norm(attention.group_norm, x, False))
        x = _resnet(resnet, x)
    return x


def _attention(attention: nn.Module, x: Tensor) -> Tensor:
    """One head over all places of all frames; a place sees its own frame and earlier ones."""
    part: Any = attention
    B, T, H, W, C = x.shape
    frame = torch.arange(T, device=x.device).repeat_interleave(H * W)
    layers = (part.to_q, part.to_k, part.to_v, part.to_out[0])
    q, k, v, out = ((w.weight.to(x.dtype), w.bias.to(x.dtype)) for w in layers)
    tokens = x.reshape(B, 1, T * H * W, C)
    mixed = F.scaled_dot_product_attention(
        *(F.linear(tokens, *w) for w in (q, k, v)), attn_mask=frame[:, None] >= frame[None, :]
    )
    return F.linear(mixed, *out).reshape(x.shape)


def _enlarge(x: Tensor, factor: tuple[float, float, float]) -> Tensor:
    """Nearest neighbours; in time every frame but the first is doubled."""
    ft, fy, fx = (int(f) for f in factor)
    B, _, H, W, C = x.shape
    if ft > 1:
        x = torch.cat([x[:, :1], x[:, 1:, None].expand(-1, -1, ft, -1, -1, -1).flatten(1, 2)], dim=1)
    if fy > 1:
        x = x[:, :, :, None, :, None].expand(-1, -1, -1, fy, -1, fx, -1)
        x = x.reshape(B, x.shape[1], H * fy, W * fx, C)
    return x
