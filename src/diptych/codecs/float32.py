"""Convolutions as exact as their dtype: cuDNN takes float32 for TF32, 10 bits of 23, unless it is told otherwise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten


class FullFloat32(TorchDispatchMode):
    """Inside, convolutions of this thread never use TF32.

    The switch is an argument of each convolution: torch's flags (`torch.backends.cudnn.allow_tf32`, true by default)
    belong to the whole process, where other threads read and set them, and are left alone. Matrix products are not
    touched: torch computes them in float32 unless a program asks for less.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is aten.convolution.default:  # what every kind of convolution comes down to
            flags = torch.backends.cudnn
            repeatable = flags.deterministic or torch.are_deterministic_algorithms_enabled()
            return aten._convolution.default(*args, flags.benchmark, repeatable, flags.enabled, False)
        return func(*args, **(kwargs or {}))


def full_float32(dtype: torch.dtype) -> AbstractContextManager[object]:
    """`FullFloat32` for a module that runs in float32; there is no need for it in another dtype."""
    if dtype is not torch.float32:
        return nullcontext()
    return FullFloat32()  # type: ignore[no-untyped-call]
