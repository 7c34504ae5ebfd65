"""Common NVIDIA cards: what their data sheets say, and how a program names them.

Rates are dense (without sparsity), of 16-bit products summed in float32; data sheets print the double where they count
sparsity, and GeForce cards do half as much with float32 sums as with 16-bit ones. Sources stand in docs/planning.md.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass

from diptych.errors import RequestError
from diptych.memory.footprint import GIB


@dataclass(frozen=True, kw_only=True)
class Card:
    """One kind of GPU.

    memory: GiB that the driver shows. half, fp8: dense TFLOP/s of tensor cores, None where there are none; bandwidth:
    TB/s of its memory. link: GB/s in one direction to another card of the host, by NVLink or else through PCIe; bus:
    GB/s in one direction to the host. capability: as CUDA counts it. smi: part of the name that nvidia-smi shows.
    """

    name: str
    smi: str
    memory: float
    half: float
    bandwidth: float
    bus: float
    capability: tuple[int, int]
    source: str
    fp8: float | None = None
    nvlink: float | None = None

    @property
    def bfloat16(self) -> bool:
        """Whether it multiplies bfloat16; older cards take float16."""
        return self.capability >= (8, 0)

    @property
    def hopper(self) -> bool:
        """Whether FlashAttention-3 and the fp8 path run on it."""
        return self.capability[0] == 9

    @property
    def link(self) -> float:
        return self.nvlink or self.bus

    @property
    def usable(self) -> int:
        """Bytes that a program can allocate: less its CUDA context and 2 % that the allocator loses in gaps.

        Whole tenths of a GiB, so that they can be written.
        """
        return int((0.98 * self.memory - 0.5) * 10) * GIB // 10


PCIE3, PCIE4, PCIE5 = 15.75, 31.5, 63.0
"""GB/s of sixteen lanes in one direction."""

_ADA = "NVIDIA Ada GPU Architecture, white paper"
_CARDS = (
    Card(
        name="t4", smi="Tesla T4", memory=15.0, half=65.0, bandwidth=0.32, bus=PCIE3, capability=(7, 5),
        source="NVIDIA T4 Tensor Core GPU, data sheet",
    ),
    Card(
        name="l4", smi="NVIDIA L4", memory=22.5, half=121.0, fp8=242.0, bandwidth=0.30, bus=PCIE4, capability=(8, 9),
        source="NVIDIA L4 Tensor Core GPU, data sheet",
    ),
    Card(
        name="l40s", smi="L40S", memory=45.0, half=362.0, fp8=733.0, bandwidth=0.864, bus=PCIE4, capability=(8, 9),
        source="NVIDIA L40S, data sheet",
    ),
    Card(
        name="3090", smi="RTX 3090", memory=24.0, half=71.0, bandwidth=0.936, bus=PCIE4, capability=(8, 6),
        source="NVIDIA Ampere GA102 GPU Architecture, white paper",
    ),
    Card(
        name="4090", smi="RTX 4090", memory=24.0, half=165.2, fp8=330.3, bandwidth=1.008, bus=PCIE4,
        capability=(8, 9), source=_ADA,
    ),
    Card(
        name="5090", smi="RTX 5090", memory=31.8, half=209.5, fp8=419.0, bandwidth=1.792, bus=PCIE5,
        capability=(12, 0), source="NVIDIA RTX Blackwell GPU Architecture, white paper",
    ),
    Card(
        name="a6000", smi="RTX A6000", memory=48.0, half=154.8, bandwidth=0.768, bus=PCIE4, capability=(8, 6),
        source="NVIDIA RTX A6000, data sheet",
    ),
    Card(
        name="6000-ada", smi="RTX 6000 Ada", memory=48.0, half=364.2, fp8=728.5, bandwidth=0.96, bus=PCIE4,
        capability=(8, 9), source=_ADA,
    ),
    Card(
        name="a100-40", smi="A100-SXM4-40GB", memory=40.0, half=312.0, bandwidth=1.555, bus=PCIE4, nvlink=300.0,
        capability=(8, 0), source="NVIDIA A100 Tensor Core GPU, data sheet",
    ),
    Card(
        name="a100-80", smi="A100-SXM4-80GB", memory=80.0, half=312.0, bandwidth=2.039, bus=PCIE4, nvlink=300.0,
        capability=(8, 0), source="NVIDIA A100 Tensor Core GPU, data sheet",
    ),
    Card(
        name="h100-pcie-80", smi="H100 PCIe", memory=79.6, half=756.0, fp8=1513.0, bandwidth=2.0, bus=PCIE5,
        capability=(9, 0), source="NVIDIA H100 Tensor Core GPU, data sheet",
    ),
    Card(
        name="h100-80", smi="H100 80GB HBM3", memory=79.6, half=989.4, fp8=1978.9, bandwidth=3.35, bus=PCIE5,
        nvlink=450.0, capability=(9, 0), source="NVIDIA H100 Tensor Core GPU, data sheet",
    ),
    Card(
        name="h200", smi="H200", memory=140.4, half=989.4, fp8=1978.9, bandwidth=4.8, bus=PCIE5, nvlink=450.0,
        capability=(9, 0), source="NVIDIA H200 Tensor Core GPU, data sheet",
    ),
    Card(
        name="b200", smi="B200", memory=179.0, half=2250.0, fp8=4500.0, bandwidth=8.0, bus=PCIE5, nvlink=900.0,
        capability=(10, 0), source="NVIDIA HGX B200, data sheet",
    ),
)  # fmt: skip
CARDS = {card.name: card for card in _CARDS}

_ALIASES = {
    "h100": "h100-80",
    "a100": "a100-80",
    "h200-141": "h200",
    "b200-180": "b200",
    "t4-16": "t4",
    "l4-24": "l4",
}


def card_named(name: str, field: str = "gpus") -> Card:
    """A card by its name in the table, however it is spelt. Raises `RequestError` naming the nearest."""
    key = re.sub(r"[\s_]+", "-", name.strip().lower())
    key = re.sub(r"^(nvidia-|tesla-|geforce-|rtx-?)+", "", key)
    key = _ALIASES.get(key, key)
    if key not in CARDS:
        near = difflib.get_close_matches(key, CARDS, n=1)
        hint = f"the nearest card is {near[0]}" if near else ""
        known = "a count and a card, such as 8xH100-80; cards are " + ", ".join(CARDS)
        raise RequestError(field, name, hint or known)
    return CARDS[key]


def card_shown(shown: str) -> Card | None:
    """The card that nvidia-smi or torch calls `shown`, such as `NVIDIA H100 80GB HBM3`; None for an unknown one."""
    return next((card for card in CARDS.values() if re.search(rf"\b{re.escape(card.smi)}\b", shown)), None)
