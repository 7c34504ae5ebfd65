"""The layers of Kandinsky 6; modules carry the parameter names of the checkpoint."""

from __future__ import annotations

import math
from operator import is_not

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from diptych.attention import exponents
from diptych.attention.kernels import bounds_pay, fuses, need_of
from diptych.attention.queries import Queries
from diptych.attention.roles import Attend, Role
from diptych.model.fp8 import takes_rows
from diptych.model.ops import (
    LAYER_NORM_EPS,
    RMS_NORM_EPS,
    Rope,
    Rows,
    common_scale,
    gelu,
    gelu_rows,
    norm_rotate,
    norm_rotate_pair,
)


class Linear32(nn.Linear):
    """A small linear layer that always computes in float32, whatever dtype its weights are stored in."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.float()
        return F.linear(input.float(), self.weight.float(), bias)


class LayerNorm32(nn.LayerNorm):
    """LayerNorm with weights, computed in float32."""

    def forward(self, input: Tensor) -> Tensor:
        return F.layer_norm(
            input.float(), self.normalized_shape, self.weight.float(), self.bias.float(), LAYER_NORM_EPS
        )


class HeadNorm(nn.Module):
    """Weight of a per-head RMSNorm; `norm_rotate` applies it."""

    def __init__(self, head_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(head_dim))


class TimestepEmbedder(nn.Module):
    """Linear, SiLU, Linear."""

    def __init__(self, width: int, time_dim: int) -> None:
        super().__init__()
        self.linear_1 = Linear32(width, time_dim)
        self.linear_2 = Linear32(time_dim, time_dim)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear_2(F.silu(self.linear_1(x)))
        return out


class TimeEmbeddings(nn.Module):
    """Timestep on the scale 0..1000 to a time vector (B, time_dim), float32."""

    def __init__(self, width: int, time_dim: int) -> None:
        super().__init__()
        self.width = width
        self.timestep_embedder = TimestepEmbedder(width, time_dim)

    def forward(self, timestep_B: Tensor) -> Tensor:
        half = self.width // 2
        steps = torch.arange(half, dtype=torch.float32, device=timestep_B.device)
        freqs = torch.exp(-math.log(10_000.0) * steps / half)
        angles = timestep_B.float()[:, None] * freqs
        out: Tensor = self.timestep_embedder(torch.cat([torch.cos(angles), torch.sin(angles)], dim=-1))
        return out


class NormedLinear(nn.Module):
    """Linear then LayerNorm with weights, float32: text, pooled text and audio latents enter through one."""

    def __init__(self, width_in: int, width_out: int) -> None:
        super().__init__()
        self.in_layer = Linear32(width_in, width_out)
        self.norm = LayerNorm32(width_out)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.in_layer(x))
        return out


class PatchEmbeddings(nn.Module):
    """1x2x2 patches of (B, T, Y, X, C) to tokens (B, T * Y/2 * X/2, D); a patch is ordered (row, column, channel)."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.in_layer = nn.Linear(4 * channels, width)

    def forward(self, x_BTYXC: Tensor) -> Tensor:
        B, T, Y, X, C = x_BTYXC.shape
        patches = x_BTYXC.reshape(B, T, Y // 2, 2, X // 2, 2, C).permute(0, 1, 2, 4, 3, 5, 6)
        weight = self.in_layer.weight.to(x_BTYXC.dtype)  # stored in float32, used once a step
        return F.linear(patches.reshape(B, -1, 4 * C), weight, self.in_layer.bias.to(x_BTYXC.dtype))


class Modulation(nn.Module):
    """SiLU and a linear layer: from the time vector (B, time_dim) to `parts` vectors of `width`, float32."""

    def __init__(self, time_dim: int, width: int) -> None:
        super().__init__()
        self.out_layer = Linear32(time_dim, width)

    def forward(self, time_BE: Tensor) -> Tensor:
        out: Tensor = self.out_layer(F.silu(time_BE.float()))
        return out


class GeluProjection(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.proj = nn.Linear(width, inner, bias=False)

    def forward(self, x: Tensor | Rows, *, rows: bool = False) -> Tensor | Rows:
        inner = self.proj(x)
        return gelu_rows(inner) if rows else gelu(inner)


class FeedForward(nn.Module):
    """Linear, GELU (erf), Linear; no biases. The empty middle entry keeps diffusers' numbering.

    rows: most tokens that are computed at once, where the four times wider inner tensor of all would be too much; None
    computes all. Every token's result depends on that token alone.
    """

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.net = nn.ModuleList([GeluProjection(width, inner), nn.Identity(), nn.Linear(inner, width, bias=False)])
        self.rows: int | None = None

    def forward(self, x: Tensor | Rows) -> Tensor:
        tokens = (x.values if isinstance(x, Rows) else x).shape[1]
        if self.rows is None or tokens <= self.rows:
            return self._of(x)
        parts = [slice(start, start + self.rows) for start in range(0, tokens, self.rows)]
        first = self._of(_tokens(x, parts[0]))
        out = first.new_empty((len(first), tokens, first.shape[2]))
        out[:, parts[0]] = first
        del first
        for part in parts[1:]:
            out[:, part] = self._of(_tokens(x, part))
        return out

    def _of(self, x: Tensor | Rows) -> Tensor:
        out: Tensor = self.net[2](self.net[0](x, rows=takes_rows(self.net[2])))
        return out


def _tokens(x: Tensor | Rows, part: slice) -> Tensor | Rows:
    return Rows(x.values[:, part], x.scale[:, part]) if isinstance(x, Rows) else x[:, part]


class Attention(nn.Module):
    """Projections around one attention; who attends how is the business of `attend`.

    Heads are contiguous slices of `head_dim`; queries and keys are normalised per head, then rotated.
    """

    def __init__(self, role: Role, width: int, head_dim: int, kv_width: int | None = None) -> None:
        super().__init__()
        self.role = role
        self.head_dim = head_dim
        kv_width = kv_width or width
        self.to_query = nn.Linear(width, width)
        self.to_key = nn.Linear(kv_width, width)
        self.to_value = nn.Linear(kv_width, width)
        self.query_norm = HeadNorm(head_dim)
        self.key_norm = HeadNorm(head_dim)
        self.out_layer = nn.Linear(width, width)
        self._bound: tuple[tuple[Tensor, ...], list[int], float] | None = None

    def forward(
        self,
        attend: Attend,
        x: Tensor | Rows,
        source: Tensor | Rows | None = None,
        rope_q: Rope | None = None,
        rope_k: Rope | None = None,
        key_mask: Tensor | None = None,
    ) -> Tensor:
        shape = (-1, self.head_dim)
        q = self.to_query(x).unflatten(-1, shape)
        k, v = (layer(x if source is None else source).unflatten(-1, shape) for layer in (self.to_key, self.to_value))
        # The kernels that ask for a bound have no gradient.
        asked = bounds_pay(q.device, q.dtype, self.head_dim) and not self._trains(q, k)
        bound = self.bound() if asked else None
        scale = 1.0 if bound is None else exponents.factor(self.head_dim)
        queries: Tensor | Queries
        if source is None:
            weights = self.query_norm.weight, self.key_norm.weight
            assert rope_q is rope_k, "the tokens are the same, and so are their positions"
            queries, k = norm_rotate_pair(q, k, *weights, rope_q, q_scale=scale, own=True)
        else:
            k = norm_rotate(k, self.key_norm.weight, rope_k, own=True)
            fused = bound is not None and fuses(need_of(q, k, key_mask, lse=False, bound=bound))
            queries = self._queries(q, rope_q, scale, v if fused else None)
        del q
        attended: Tensor | Rows
        attended = attend(self.role, queries, k, v, key_mask, bound=bound).flatten(-2)
        if isinstance(queries, Queries) and attended.dtype == torch.float8_e4m3fn:
            assert queries.fp8_scale is not None
            scale_BS1 = queries.fp8_scale.expand(*attended.shape[:-1], 1).contiguous()
            attended = Rows(attended, scale_BS1)
        del queries, k, v
        out: Tensor = self.out_layer(attended)
        return out

    def _queries(self, q: Tensor, rope: Rope | None, scale: float, v: Tensor | None) -> Tensor | Queries:
        """v: the values, where the kernel makes something of `Queries`."""

        def normed() -> Tensor:
            return norm_rotate(q, self.query_norm.weight, rope, scale=scale, own=True)

        if v is None:
            return normed()
        # An average of values is no larger than the largest of them.
        fp8_scale = common_scale(v) if takes_rows(self.out_layer) else None
        if rope is not None:
            return Queries(normed(), fp8_scale=fp8_scale)
        return Queries(q, self.query_norm.weight, scale, RMS_NORM_EPS, normed, fp8_scale)

    def _trains(self, q: Tensor, k: Tensor) -> bool:
        """Whether a gradient of what this computes is wanted: by what comes in, or by a weight of its own."""
        return torch.is_grad_enabled() and (
            q.requires_grad or k.requires_grad or any(weight.requires_grad for weight in self.parameters())
        )

    def bound(self) -> float:
        """`exponents.bound` of its norms, computed once for the weights as they are: that waits for the device."""
        weights = self.query_norm.weight, self.key_norm.weight
        # Tensors of inference mode count no changes: they are known by what they are alone.
        changes = [-1 if weight.is_inference() else weight._version for weight in weights]
        if self._bound is None or self._bound[1] != changes or any(map(is_not, self._bound[0], weights)):
            # The weights are kept, not their ids: another tensor may be where one has been.
            self._bound = weights, changes, exponents.bound(*weights)
        return self._bound[2]
