"""How an engine is to run: settled once, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch

from diptych.errors import LayoutError, RequestError
from diptych.model.checkpoint import Checkpoint
from diptych.parallel.layout import Layout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Options:
    """device: `cpu`, `cuda`, `cuda:1`; dtype: of matrix products and attention.

    step_timeout: how long ranks may be silent before they are taken for hung.
    decode_budget: bytes that decoding may take, or None for the default plan.
    trace: folder for the timings of every rank, or None not to take any.
    """

    checkpoint: Checkpoint
    layout: Layout
    device: torch.device
    dtype: torch.dtype
    step_timeout: timedelta
    decode_budget: int | None = None
    trace: Path | None = None

    def device_of(self, local_rank: int) -> torch.device:
        """The device of one rank of this host."""
        if self.device.type == "cuda" and self.layout.world > 1:
            return torch.device("cuda", local_rank)
        return self.device


def pick_device(name: str | None) -> torch.device:
    """The device that is meant: by default the first GPU, else the CPU. Raises `RequestError` for one not here."""
    if name is None:
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise RequestError("device", name, "cpu, cuda or cuda:N") from None
    if device.type not in ("cpu", "cuda"):
        raise RequestError("device", name, "cpu, cuda or cuda:N")
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if not count:
            raise RequestError("device", name, "torch finds no NVIDIA GPU here; use cpu")
        if (device.index or 0) >= count:
            raise RequestError("device", name, f"there are {count} GPUs here, cuda:0 to cuda:{count - 1}")
        device = torch.device("cuda", device.index or 0)
    return device


def pick_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The working dtype that is meant: float32 on a CPU, bfloat16 on a GPU that has it, else float16."""
    if name is None:
        if device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    if name not in DTYPES:
        raise RequestError("dtype", name, "one of " + ", ".join(DTYPES))
    return DTYPES[name]


def check_room(layout: Layout, device: torch.device, ranks_here: int) -> None:
    """Raise `LayoutError` when the ranks of a layout find no GPU each on this host."""
    if device.type == "cuda" and ranks_here > torch.cuda.device_count():
        raise LayoutError(
            f"layout {layout} takes {layout.world} GPUs, and there are {torch.cuda.device_count()} here; "
            "ask for fewer, or add --device cpu to try it on the CPU"
        )
