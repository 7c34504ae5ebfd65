"""torch's allocator on a GPU, for engines that were given a limit."""

from __future__ import annotations

import os

import torch

GROWING = "expandable_segments:True"
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def grow_segments(device: torch.device) -> bool:
    """Let torch grow the piece of memory it has, rather than ask for another; holds for the whole process from now on.

    By default what was freed lies in pieces as large as they were asked for, and a larger tensor fits none of them:
    with 14.5 GiB, fp8 blocks that stream left 0.7 GiB that nothing could use. Whoever has settled that in the
    environment keeps what they chose. Returns whether it was done.
    """
    if device.type != "cuda" or any("expandable_segments" in os.environ.get(name, "") for name in VARIABLES):
        return False
    set_allocator(GROWING)
    return True


def ran_out(error: BaseException) -> bool:
    """Whether a device had no memory left for what was asked.

    FlashAttention-3 calls torch through its stable interface, where a tensor that finds no room is a call that failed.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "aten::new_empty" in str(error) and "API call failed" in str(error)


def set_allocator(text: str) -> None:
    """Change torch's allocator as its environment variable would. Raises `ValueError` for a text it does not know."""
    torch._C._accelerator_setAllocatorSettings(text)
