"""How an engine is to run: settled once, before anything is loaded."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, cast, get_args

import torch

from diptych.attention.cores import is_hopper
from diptych.attention.kernels import APPROXIMATE
from diptych.attention.roles import Role
from diptych.errors import LayoutError, RequestError
from diptych.memory.footprint import Offload, TextPrecision
from diptych.memory.precision import EXACT, Precision
from diptych.model.checkpoint import Checkpoint
from diptych.parallel.layout import Layout
from diptych.planner.options import pick_bytes as pick_bytes
from diptych.sampling.caches import CachePlan
from diptych.sampling.pipefusion import PipeSettings

Modulation = Literal["resident", "tables"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Options:
    """device: `cpu`, `cuda`, `cuda:1`; dtype: of matrix products and attention.

    step_timeout: how long ranks may be silent before they are taken for hung.
    decode_budget: bytes that decoding may take, or None for the default plan.
    trace: folder for the timings of every rank, or None not to take any.
    precision: what is computed in fp8, if anything is.
    text_precision: exact, or the weights of the language model rounded to 8 bits or to NF4.
    modulation: whether its weights stay on the device, or only tables of what they give for each step.
    offload: what is on the device only while it is used: nothing, each model, or each block of the transformer.
    memory: bytes that all of this may take on each device, or None for no limit.
    pipe: how patches pass through a layout with several pipeline stages; None for one with a single stage.
    """

    checkpoint: Checkpoint
    layout: Layout
    device: torch.device
    dtype: torch.dtype
    step_timeout: timedelta
    decode_budget: int | None = None
    trace: Path | None = None
    precision: Precision = EXACT
    text_precision: TextPrecision = "exact"
    modulation: Modulation = "resident"
    offload: Offload = "none"
    memory: int | None = None
    pipe: PipeSettings | None = None

    @property
    def vae_dtype(self) -> torch.dtype:
        """float16 on a GPU where the transformer does not run in float32, as the authors run it."""
        wide = self.dtype is torch.float32 or self.device.type == "cpu"
        return torch.float32 if wide else torch.float16

    @property
    def kernels(self) -> dict[Role, str]:
        """The attention kernels that are asked for by role."""
        return dict(APPROXIMATE) if self.precision.kind == "fp8" else {}

    @property
    def approximate(self) -> tuple[str, ...]:
        """What is not exact in every clip of this engine beside its `precision`, a sentence each."""
        if self.text_precision == "exact":
            return ()
        bits = {"8bit": "8 bits", "nf4": "4 bits (NF4)"}[self.text_precision]
        return (f"text precision {self.text_precision}: the language model's weights are rounded to {bits}",)

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
    except (RuntimeError, TypeError):
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
    if not isinstance(name, str) or name not in DTYPES:
        raise RequestError("dtype", name, "one of " + ", ".join(DTYPES))
    return DTYPES[name]


def pick_precision(name: str, device: torch.device, dtype: torch.dtype) -> Precision:
    """The precision that is meant. Raises `RequestError` for one that does not exist, or that this device or dtype
    cannot have."""
    precision = Precision.parse(name)
    if precision.kind == "fp8" and device.type == "cuda" and not (is_hopper(device) and dtype is torch.bfloat16):
        raise RequestError("precision", name, "it takes a Hopper GPU and dtype bfloat16; use exact")
    return precision


def pick_text_precision(name: str) -> TextPrecision:
    """Raises `RequestError` for a name that does not exist, or one that takes a package which is not here."""
    if name not in get_args(TextPrecision):
        raise RequestError("text_precision", name, "exact, 8bit or nf4")
    if name == "nf4" and importlib.util.find_spec("bitsandbytes") is None:
        raise RequestError("text_precision", name, 'it takes pip install "diptych[text-nf4]"; 8bit takes nothing more')
    return cast(TextPrecision, name)


def pick_modulation(name: str) -> Modulation:
    """Raises `RequestError` for a name that does not exist."""
    if name not in get_args(Modulation):
        raise RequestError("modulation", name, "resident or tables")
    return cast(Modulation, name)


def pick_offload(name: str | None) -> Offload | None:
    """None leaves the choice to the memory there is. Raises `RequestError` for a name that does not exist."""
    if name is not None and name not in get_args(Offload):
        raise RequestError("offload", name, "none, model or block")
    return cast(Offload | None, name)


def pick_cache(text: str | None, checkpoint: Checkpoint) -> CachePlan | None:
    """The step cache that is meant; None and `none` compute everything. Raises `RequestError`."""
    if text is not None and not isinstance(text, str):
        raise RequestError("cache", text, "a text, such as none")
    return None if text is None or text.strip() == "none" else CachePlan.of(text, checkpoint)


def pick_pipefusion(text: str | None, layout: Layout) -> PipeSettings | None:
    """How patches pass through the stages of a layout; None where it has one stage. Raises `RequestError`."""
    if layout.pipeline == 1:
        if text is not None:
            raise RequestError("pipefusion", text, f"it goes with a layout such as pipeline=2, not with {layout}")
        return None
    return PipeSettings.parse(text, layout.pipeline)


def check_cache(cache: CachePlan | None, layout: Layout) -> None:
    """Raise `RequestError` for a step cache where PipeFusion reuses earlier steps already."""
    if cache is not None and layout.pipeline > 1:
        raise RequestError(
            "cache",
            cache.settings.name,
            f"layout {layout} reuses keys and values of earlier steps already; none, or a layout without pipeline",
        )


def check_room(layout: Layout, device: torch.device, ranks_here: int) -> None:
    """Raise `LayoutError` when the ranks of a layout find no GPU each on this host."""
    if device.type == "cuda" and ranks_here > torch.cuda.device_count():
        raise LayoutError(
            f"layout {layout} takes {layout.world} GPUs, and there are {torch.cuda.device_count()} here; "
            "ask for fewer, or add --device cpu to try it on the CPU"
        )
    most = 8 * (os.cpu_count() or 1)
    if device.type == "cpu" and ranks_here > most:
        raise LayoutError(
            f"layout {layout} starts {layout.world} processes; on the CPU of this machine at most {most}."
        )
