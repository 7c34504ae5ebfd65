"""A stand-in, in plain torch and on any device, for the kernel that holds few keys and finishes its queries."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from diptych.attention import kernels
from diptych.attention.queries import Queries

PLAIN = kernels.KERNELS[-1]


class FewKeys:
    """`kernels` is the registry with this in it; `seen` remembers the queries it was given."""

    def __init__(self) -> None:
        self.seen: list[Queries] = []
        short = next(kernel for kernel in kernels.KERNELS if kernel.name == "bounded-short")
        able = replace(
            short,
            device=None,
            dtypes=PLAIN.dtypes,
            core=PLAIN.core,
            head_dim_step=1,
            best_queries=0,
            fused=self,
            usable=None,
        )
        self.kernels = (able, *kernels.KERNELS)

    def __call__(self, q: Queries, k_BSHK: Tensor, v_BSHK: Tensor) -> Tensor:
        self.seen.append(q)
        x = q.x_BSHK
        if q.weight_K is not None:
            x = F.rms_norm(x.float(), x.shape[-1:], q.weight_K.float() * q.scale, eps=q.eps).to(x.dtype)
        out = PLAIN(x, k_BSHK, v_BSHK, bound=1.0)
        return out if q.fp8_scale is None else (out.float() / q.fp8_scale).to(torch.float8_e4m3fn)
