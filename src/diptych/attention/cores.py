"""The calls behind the kernels: q_BSHK, k_BSHK, v_BSHK, key mask, whether the log-sum-exp is wanted, and the scale.

Softmax is taken of `scale * q k`.

No core is given empty input; one whose kernel takes no mask is never given one. For a batch entry whose keys are all
masked the result is undefined here and settled by the caller.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from diptych.attention.queries import Queries

GLUON_FIRST, GLUON_LAST = (3, 6), (3, 8)
"""Versions of Triton: what torch 2.11 to 2.14 bring. Both ends are compiled by tests or were run."""
MASKED = -1e30
"""Bias of a masked key. Finite: a tile of nothing but masked keys must not make NaN inside a kernel."""


class Core(Protocol):
    def __call__(
        self, q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, key_mask_BS: Tensor | None, lse: bool, scale: float, /
    ) -> tuple[Tensor, Tensor | None]: ...


def cpu_flash(
    q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, key_mask_BS: Tensor | None, lse: bool, scale: float
) -> tuple[Tensor, Tensor | None]:
    bias_B11S = None if key_mask_BS is None else _bias(key_mask_BS, q_BSHK.dtype)
    out_BHSK, lse_BHS = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q_BSHK.transpose(1, 2), k_BSHK.transpose(1, 2), v_BSHK.transpose(1, 2), attn_mask=bias_B11S, scale=scale
    )
    return out_BHSK.transpose(1, 2), lse_BHS.transpose(1, 2) if lse else None


def cuda_flash(
    q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, key_mask_BS: Tensor | None, lse: bool, scale: float
) -> tuple[Tensor, Tensor | None]:
    out_BHSK, lse_BHS, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        q_BSHK.transpose(1, 2), k_BSHK.transpose(1, 2), v_BSHK.transpose(1, 2), scale=scale
    )
    return out_BHSK.transpose(1, 2), lse_BHS.transpose(1, 2) if lse else None


def cuda_cudnn(
    q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, key_mask_BS: Tensor | None, lse: bool, scale: float
) -> tuple[Tensor, Tensor | None]:
    bias_BHSS = None if key_mask_BS is None else _aligned_bias(q_BSHK, key_mask_BS)
    out_BHSK, lse_BHS, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        q_BSHK.transpose(1, 2), k_BSHK.transpose(1, 2), v_BSHK.transpose(1, 2), bias_BHSS, lse, scale=scale
    )
    if lse and lse_BHS.ndim == 4:  # some releases keep cuDNN's trailing unit dimension
        lse_BHS = lse_BHS.squeeze(-1)
    return out_BHSK.transpose(1, 2), lse_BHS.transpose(1, 2) if lse else None


def cuda_efficient(
    q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, key_mask_BS: Tensor | None, lse: bool, scale: float
) -> tuple[Tensor, Tensor | None]:
    bias_BHSS = None if key_mask_BS is None else _aligned_bias(q_BSHK, key_mask_BS)
    out_BHSK, lse_BHS, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
        q_BSHK.transpose(1, 2), k_BSHK.transpose(1, 2), v_BSHK.transpose(1, 2), bias_BHSS, lse, scale=scale
    )
    queries = q_BSHK.shape[1]  # the kernel pads the rows of its log-sum-exp to a multiple of 32
    return out_BHSK.transpose(1, 2), lse_BHS[..., :queries].transpose(1, 2) if lse else None


def math(
    q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, key_mask_BS: Tensor | None, lse: bool, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Plain matrix products; holds all S x S scores, in float32 (float64 for float64)."""
    wide = torch.float64 if q_BSHK.dtype == torch.float64 else torch.float32
    group = q_BSHK.shape[2] // k_BSHK.shape[2]
    q_BHSK, k_BHSK, v_BHSK = (x.transpose(1, 2).to(wide) for x in (q_BSHK, k_BSHK, v_BSHK))
    if group > 1:
        k_BHSK, v_BHSK = k_BHSK.repeat_interleave(group, 1), v_BHSK.repeat_interleave(group, 1)
    scores_BHSS = (q_BHSK * scale) @ k_BHSK.transpose(2, 3)
    if key_mask_BS is not None:
        scores_BHSS = scores_BHSS.masked_fill(~key_mask_BS[:, None, None, :], MASKED)
    lse_BHS1 = scores_BHSS.logsumexp(-1, keepdim=True)
    out_BHSK = (scores_BHSS - lse_BHS1).exp() @ v_BHSK
    return out_BHSK.transpose(1, 2).to(q_BSHK.dtype), lse_BHS1[..., 0].transpose(1, 2) if lse else None


def bounded(
    q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, key_mask_BS: Tensor | None, lse: bool, scale: float
) -> tuple[Tensor, Tensor | None]:
    """Scores are exponents of two, so `scale` is ln 2: a kernel that computes 2^s has no need of it."""
    from diptych.attention import bounded_kernel

    return bounded_kernel.attention(q_BSHK, k_BSHK, v_BSHK, lse)


def bounded_short(
    q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, key_mask_BS: Tensor | None, lse: bool, scale: float
) -> tuple[Tensor, Tensor | None]:
    """The same for few keys, which it holds."""
    return bounded_short_fused(Queries(q_BSHK), k_BSHK, v_BSHK), None


def bounded_short_fused(q: Queries, k_BSHK: Tensor, v_BSHK: Tensor) -> Tensor:
    """With what is still to be done to the queries, and to what comes out."""
    from diptych.attention import short_kernel

    return short_kernel.attention(q, k_BSHK, v_BSHK)


def has_gluon(device: torch.device) -> bool:
    """A Hopper GPU, and a Triton whose language for kernels of its kind is the one that ours are written in."""
    return gluon_refusal() is None and is_hopper(device)


@cache
def gluon_refusal() -> str | None:
    """Why this Triton cannot compile our Gluon kernels; None if it can. Gluon is experimental and changes."""
    try:
        from triton import __version__
        from triton.experimental import gluon  # noqa: F401
    except ImportError:
        return "Triton with Gluon is not installed"
    # 3.7rc1 is a version too, of which the digits count.
    version = tuple(int(part[: len(part) - len(part.lstrip("0123456789"))]) for part in __version__.split(".")[:2])
    if not GLUON_FIRST <= version <= GLUON_LAST:
        first, last = (".".join(map(str, bound)) for bound in (GLUON_FIRST, GLUON_LAST))
        return f"Triton {__version__} is not one of {first} to {last}, whose Gluon the kernels are written in"
    return None


def is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_properties(device).major == 9


def from_ampere(device: torch.device) -> bool:
    """What cuDNN's and FlashAttention-2's kernels need: torch refuses them on a T4 or V100. True where no GPU is."""
    return not torch.cuda.is_available() or torch.cuda.get_device_properties(device).major >= 8


def _bias(key_mask_BS: Tensor, dtype: torch.dtype) -> Tensor:
    masked = max(MASKED, torch.finfo(dtype).min)
    bias_BS = torch.zeros(key_mask_BS.shape, dtype=dtype, device=key_mask_BS.device)
    return bias_BS.masked_fill(~key_mask_BS, masked)[:, None, None, :]


def _aligned_bias(q_BSHK: Tensor, key_mask_BS: Tensor) -> Tensor:
    """(B, H, S of q, S of k), broadcast without copying; rows start at 16-byte borders, as the CUDA kernels demand."""
    B, S, H, _ = q_BSHK.shape
    keys = key_mask_BS.shape[1]
    padded_BS = torch.nn.functional.pad(key_mask_BS, (0, -keys % 16))
    return _bias(padded_BS, q_BSHK.dtype)[..., :keys].expand(B, H, S, keys)


def _import_fa3() -> tuple[Any, tuple[torch.dtype, ...]]:
    for module, dtypes in (
        ("fa3_fwd_interface", (torch.bfloat16,)),  # this wheel is built without float16
        ("flash_attn_interface", (torch.bfloat16, torch.float16)),
    ):
        try:
            return importlib.import_module(module).flash_attn_func, dtypes
        except (ImportError, OSError, AttributeError):  # not installed, or built for another torch or machine
            continue
    return None, ()


_fa3_func, fa3_dtypes = _import_fa3()


def fa3_splits(q_shape: Sequence[int]) -> int:
    """1: every block of 128 queries walks over all keys. More: the keys are split among idle processors; 0: as
    FlashAttention-3 thinks best, which a compiler cannot trace.

    225 audio queries on 51,840 video keys fill a quarter of an H200: 0.67 ms whole, 0.28 ms split.
    """
    B, S, H, _ = q_shape
    if B * H * -(-S // 128) >= 128:
        return 1
    return 4 if torch.compiler.is_compiling() else 0


def _fa3(
    q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor, key_mask_BS: Tensor | None, lse: bool, scale: float
) -> tuple[Tensor, Tensor | None]:
    how = {"softmax_scale": scale, "num_splits": fa3_splits(q_BSHK.shape)}
    if not lse:
        return _fa3_func(q_BSHK, k_BSHK, v_BSHK, **how), None
    out_BSHK, lse_BHS = _fa3_func(q_BSHK, k_BSHK, v_BSHK, return_attn_probs=True, **how)
    return out_BSHK, lse_BHS.transpose(1, 2)


fa3: Core | None = None if _fa3_func is None else _fa3
"""FlashAttention-3, or None where neither `fa3_fwd_interface` nor `flash_attn_interface` can be imported."""
