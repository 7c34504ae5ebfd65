"""A small registry of attention kernels. Each says what it can do; asking one for more is an error that names another.

Every kernel takes q_BSHK, k_BSHK, v_BSHK and `key_mask_BS` (bool, True: visible; None: all) and scales by 1/sqrt(K).
Given `bound`, queries carry log2(e)/sqrt(K) already, and no |q k| is larger than that (`exponents`).
With the log-sum-exp it returns natural logarithms, (B, S, H), float32 (float64 for float64 input). A query that sees
no key gets zeros, and `NO_KEY` as its log-sum-exp: finite, so that merging partial results needs no special case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from diptych.attention import exponents
from diptych.attention.cores import (
    Core,
    bounded,
    bounded_short,
    bounded_short_fused,
    cpu_flash,
    cuda_cudnn,
    cuda_efficient,
    cuda_flash,
    fa3,
    fa3_dtypes,
    from_ampere,
    has_gluon,
    is_hopper,
    math,
)
from diptych.attention.int8 import bounded_int8
from diptych.attention.queries import HELD, Queries, made
from diptych.attention.roles import Role
from diptych.errors import KernelError

APPROXIMATE = {Role.VISUAL_SELF: "bounded-int8"}
"""What fewer bits than the working dtype has pay for, by role: kernels that are asked for with `--precision fp8`."""

NO_KEY = -1e30
"""The log-sum-exp of a query without any visible key: weight 0 beside every other, and no NaN beside its like."""

KernelName = Literal[
    "auto", "bounded", "bounded-short", "bounded-int8", "fa3", "sdpa-cudnn", "sdpa-flash", "sdpa-efficient", "sdpa-math"
]


class Need(NamedTuple):
    """What one call asks of a kernel. `queries`, `keys`: lengths; `grouped`: fewer heads in k and v than in q.

    bound: None, or the scores are exponents of two and none is larger than this.
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    queries: int
    keys: int
    grouped: bool
    masked: bool
    lse: bool
    bound: float | None = None


@dataclass(frozen=True)
class Kernel:
    """One way to compute softmax attention on one kind of device (`device` None: on any).

    head_dim_step, head_dim_max: K must be a multiple of the one and at most the other.
    least: fewest queries and keys, where there are any; usable: whether this very device has what the kernel needs.
    best_from: fewest keys with which it is the fastest; with fewer, `"auto"` prefers the next that can.
    best_queries: the same of queries.
    held: most channels of one head's keys together, where all of them are held at once.
    bounded: it needs scores that are exponents of two, the largest at most `exponents.MOST`.
    fused: the same of `Queries`, without mask and log-sum-exp; None: it takes them `made()`.
    exact: False for an approximation, which `"auto"` never takes, and for which the exact ones stand in.
    """

    name: str
    device: str | None
    dtypes: tuple[torch.dtype, ...]
    core: Core
    mask: bool = True
    lse: bool = True
    grouped: bool = True
    head_dim_step: int = 1
    head_dim_max: int | None = None
    least: int = 0
    best_from: int = 0
    best_queries: int = 0
    held: int | None = None
    bounded: bool = False
    fused: Callable[[Queries, Tensor, Tensor], Tensor] | None = None
    exact: bool = True
    usable: Callable[[torch.device], bool] | None = None

    def refusal(self, need: Need) -> str | None:
        """Why this kernel cannot serve `need`, as the end of a sentence; None if it can."""
        if self.device is not None and need.device.type != self.device:
            return f"runs on {self.device}, not on {need.device.type}"
        if need.dtype not in self.dtypes:
            return f"takes {_names(self.dtypes)}, not {_names((need.dtype,))}"
        if need.masked and not self.mask:
            return "takes no key mask"
        if need.lse and not self.lse:
            return "does not return the log-sum-exp"
        if need.grouped and not self.grouped:
            return "needs as many key heads as query heads"
        if need.head_dim % self.head_dim_step:
            return f"needs a head size that is a multiple of {self.head_dim_step}, not {need.head_dim}"
        if self.head_dim_max is not None and need.head_dim > self.head_dim_max:
            return f"takes head sizes up to {self.head_dim_max}, not {need.head_dim}"
        if 0 < min(need.queries, need.keys) < self.least:
            return f"needs at least {self.least} queries and keys"
        if self.held is not None and need.keys * need.head_dim > self.held:
            return f"holds {self.held // need.head_dim} keys, not {need.keys}"
        if self.bounded and need.bound is None:
            return "needs scores with a known bound"
        if self.bounded and need.bound is not None and need.bound > exponents.MOST:
            return f"takes scores up to 2^{exponents.MOST:g}, not 2^{need.bound:.0f}"
        if self.usable is not None and not self.usable(need.device):
            return "is not available on this GPU"
        return None

    def best(self, need: Need) -> bool:
        """Whether it is the fastest at these lengths, of those that can."""
        return need.keys >= self.best_from and need.queries >= self.best_queries

    def __call__(
        self,
        q_BSHK: Tensor | Queries,
        k_BSHK: Tensor,
        v_BSHK: Tensor,
        key_mask_BS: Tensor | None = None,
        *,
        bound: float | None = None,
    ) -> Tensor:
        """Attention, (B, S of q, H, K) in the dtype of q, or as `Queries` allow."""
        if isinstance(q_BSHK, Queries) and self.fused is not None and q_BSHK.x_BSHK.numel() and k_BSHK.numel():
            refusal = self.refusal(need_of(q_BSHK, k_BSHK, key_mask_BS, False, bound))
            assert refusal is None, f"kernel {self.name} {refusal}"
            return self.fused(q_BSHK, k_BSHK, v_BSHK)
        q_BSHK = made(q_BSHK)
        out_BSHK, _ = self._run(q_BSHK, k_BSHK, v_BSHK, key_mask_BS, False, bound)
        return out_BSHK

    def with_lse(
        self,
        q_BSHK: Tensor,
        k_BSHK: Tensor,
        v_BSHK: Tensor,
        key_mask_BS: Tensor | None = None,
        *,
        bound: float | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attention and its log-sum-exp (B, S of q, H)."""
        out_BSHK, lse_BSH = self._run(q_BSHK, k_BSHK, v_BSHK, key_mask_BS, True, bound)
        assert lse_BSH is not None
        return out_BSHK, lse_BSH

    def _run(
        self,
        q_BSHK: Tensor,
        k_BSHK: Tensor,
        v_BSHK: Tensor,
        key_mask_BS: Tensor | None,
        lse: bool,
        bound: float | None,
    ) -> tuple[Tensor, Tensor | None]:
        refusal = self.refusal(need_of(q_BSHK, k_BSHK, key_mask_BS, lse, bound))
        assert refusal is None, f"kernel {self.name} {refusal}"
        B, S, H, K = q_BSHK.shape
        lse_dtype = torch.float64 if q_BSHK.dtype == torch.float64 else torch.float32
        if B * S * H == 0 or k_BSHK.shape[1] == 0:  # several kernels die on empty input, some with a signal
            empty_lse = q_BSHK.new_full((B, S, H), NO_KEY, dtype=lse_dtype) if lse else None
            return torch.zeros_like(q_BSHK, memory_format=torch.contiguous_format), empty_lse
        scale = K**-0.5 if bound is None else 1 / exponents.LOG2_E
        out_BSHK, lse_BSH = self.core(q_BSHK, k_BSHK, v_BSHK, key_mask_BS, lse, scale)
        if key_mask_BS is not None:
            visible_B111 = key_mask_BS.any(1)[:, None, None, None]
            out_BSHK = torch.where(visible_B111, out_BSHK, 0)
            if lse_BSH is not None:
                lse_BSH = torch.where(visible_B111[..., 0], lse_BSH, NO_KEY)
        return out_BSHK, lse_BSH if lse_BSH is None else lse_BSH.to(lse_dtype)


def need_of(
    q: Tensor | Queries, k_BSHK: Tensor, key_mask_BS: Tensor | None, lse: bool, bound: float | None = None
) -> Need:
    """What a call with these tensors asks for."""
    q_BSHK = q.x_BSHK if isinstance(q, Queries) else q
    grouped = q_BSHK.shape[2] != k_BSHK.shape[2]
    _, S, _, K = q_BSHK.shape
    return Need(q_BSHK.device, q_BSHK.dtype, K, S, k_BSHK.shape[1], grouped, key_mask_BS is not None, lse, bound)


def pick(name: str, need: Need) -> Kernel:
    """The kernel called `name`; `"auto"`: the fastest that can, in the order of `KERNELS` but for `best_from`.

    Whoever names an approximation allows it: where it cannot serve, the exact one that `"auto"` takes does.
    Raises `KernelError` for an unknown name, or for an exact kernel that cannot serve `need`, naming one that can.
    """
    able = [kernel for kernel in KERNELS if kernel.refusal(need) is None]
    if name == "auto":
        exact = [kernel for kernel in able if kernel.exact]
        assert exact, f"sdpa-math serves every call, but not {need}"
        return next((kernel for kernel in exact if kernel.best(need)), exact[0])
    for kernel in able:
        if kernel.name == name:
            return kernel
    check_name(name)
    if not all(kernel.exact for kernel in KERNELS if kernel.name == name):
        return pick("auto", need)
    raise KernelError(f"attention kernel {name} {_refusal_of(name, need)}; use {_or([k.name for k in able])}.")


def bounds_pay(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether a kernel here asks for scores with a bound, so that whoever makes queries should say one."""
    need = Need(device, dtype, head_dim, 2**16, 2**16, grouped=False, masked=False, lse=False, bound=0.0)
    return any(kernel.bounded and kernel.refusal(need) is None for kernel in KERNELS)


def fuses(need: Need) -> bool:
    """Whether the kernel that `"auto"` takes makes something of `Queries`."""
    return pick("auto", need).fused is not None


def check_name(name: str) -> None:
    """Raises `KernelError` if no kernel of that name exists here (`fa3` only where its package is installed)."""
    known = ["auto", *dict.fromkeys(kernel.name for kernel in KERNELS)]
    if name == "fa3" and name not in known:
        raise KernelError(f"attention kernel fa3 needs the package fa3-fwd, which is not installed; use {_or(known)}.")
    if name not in known:
        raise KernelError(f"attention kernel {name!r} does not exist; use {_or(known)}.")


def _refusal_of(name: str, need: Need) -> str:
    candidates = [kernel for kernel in KERNELS if kernel.name == name]
    here = [kernel for kernel in candidates if kernel.device in (None, need.device.type)]
    return (here or candidates)[0].refusal(need) or ""


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def _or(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " or " + names[-1]


_HALF = (torch.bfloat16, torch.float16)
_SINGLE = (*_HALF, torch.float32)
_ALL = (*_SINGLE, torch.float64)

_FA3 = (
    [
        Kernel(
            "fa3",
            "cuda",
            fa3_dtypes,
            fa3,
            mask=False,
            head_dim_step=8,
            head_dim_max=256,
            best_from=1024,  # measured on an H200: 51,840 queries on 200 keys take it 0.71 ms, cuDNN 0.52 ms
            usable=is_hopper,
        ),
    ]
    if fa3 is not None
    else []
)
KERNELS: tuple[Kernel, ...] = (
    Kernel(
        "bounded",
        "cuda",
        (torch.bfloat16,),
        bounded,
        mask=False,
        grouped=False,
        head_dim_step=64,
        head_dim_max=128,
        best_from=1024,
        best_queries=1024,  # 225 queries fill a quarter of an H200, and no keys are split here
        bounded=True,
        usable=has_gluon,
    ),
    Kernel(
        "bounded-int8",
        "cuda",
        (torch.bfloat16,),
        bounded_int8,
        mask=False,
        grouped=False,
        head_dim_step=128,  # on heads of 64 it is no faster than the exact one
        head_dim_max=128,
        bounded=True,
        exact=False,
        usable=has_gluon,
    ),
    Kernel(
        "bounded-short",
        "cuda",
        (torch.bfloat16,),
        bounded_short,
        mask=False,
        lse=False,
        grouped=False,
        head_dim_step=64,
        head_dim_max=128,
        best_queries=4096,  # with fewer the time to start it is what counts, and cuDNN starts sooner
        held=HELD,
        bounded=True,
        fused=bounded_short_fused,
        usable=has_gluon,
    ),
    *_FA3,
    Kernel("sdpa-cudnn", "cuda", _HALF, cuda_cudnn, head_dim_step=8, head_dim_max=128, least=2, usable=from_ampere),
    Kernel("sdpa-flash", "cuda", _HALF, cuda_flash, mask=False, head_dim_step=8, head_dim_max=256, usable=from_ampere),
    Kernel("sdpa-efficient", "cuda", _SINGLE, cuda_efficient, grouped=False, head_dim_step=8),
    Kernel("sdpa-flash", "cpu", _ALL, cpu_flash),
    Kernel("sdpa-math", None, _ALL, math),
)
"""In the order `"auto"` tries them. `fa3` stands here where its package can be imported."""
