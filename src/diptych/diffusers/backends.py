"""Which of our kernels stands for which attention backend of diffusers."""

from __future__ import annotations

from typing import Any

from diffusers.models.attention_dispatch import _AttentionBackendRegistry

from diptych.attention.kernels import check_name
from diptych.errors import KernelError

KERNEL_OF = {
    "native": "auto",
    "_native_cudnn": "sdpa-cudnn",
    "_native_flash": "sdpa-flash",
    "_native_efficient": "sdpa-efficient",
    "_native_math": "sdpa-math",
    "_flash_3": "fa3",
    "_flash_3_hub": "fa3",
}
"""Only backends that compute what ours compute. All of ours return the log-sum-exp, which rings and merges need."""


def kernel_of(backend: Any) -> str:
    """The name of the kernel for a backend (`None`: the one that is active in diffusers).

    Raises `KernelError` for a backend that has no counterpart here.
    """
    if backend is None:
        backend = _AttentionBackendRegistry.get_active_backend()[0]
    name = str(getattr(backend, "value", backend))
    if name not in KERNEL_OF:
        raise KernelError(
            f"attention backend {name} is not accepted: it cannot return what split attention needs; "
            f"use {', '.join(list(KERNEL_OF)[:-1])} or {list(KERNEL_OF)[-1]}."
        )
    return KERNEL_OF[name]


def check_backend(backend: Any) -> None:
    """Raises `KernelError` if `backend` has no counterpart, or its kernel is not installed here."""
    check_name(kernel_of(backend))
