"""What the sections of a run share: toy sizes with `--tiny`, the real ones without."""

from __future__ import annotations

import gc
import sys
import traceback
from collections.abc import Callable
from typing import Any

import torch

from diptych.bench.geometry import Geometry
from diptych.bench.timing import median

TINY = "--tiny" in sys.argv
OURS = "--ours" in sys.argv
"""Leave out what is known already: stock Pro, page-locked and exact runs, profiles."""
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
HALF = torch.bfloat16
SIZE = Geometry.parse("96x64x9" if TINY else "864x480x125")
TEXT = 9 if TINY else 200


def ms(call: Callable[[], object], repeats: int = 10) -> float:
    return median(call, DEVICE, repeats=repeats, warmup=2) * 1e3


def ms_many(call: Callable[[], object], calls: int = 20) -> float:
    """Of one of many calls on end, where starting one takes as long as the call itself."""

    def on_end() -> None:
        for _ in range(calls):
            call()

    return ms(on_end, 5) / calls


def randn(*shape: int, dtype: torch.dtype = HALF) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)


def tried(call: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """What `call` finds, or how it failed: a part of a section that costs the others nothing."""
    try:
        return call(*given)
    except Exception:
        return {"failed": traceback.format_exc()[-1500:]}


def free() -> None:
    gc.collect()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def wait() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
