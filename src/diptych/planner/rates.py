"""How much of a card's data sheet a forward gets: measured on one H200, taken over to the others.

Every share is (measured on an H200) / (its data sheet: 989.4 TFLOP/s, 1,978.9 in fp8, 4.8 TB/s), from the profiles of
whole forwards in benchmarks/results; docs/planning.md tells which. For cards that were never measured they are what an
equally good kernel would reach, no more: an estimate, and every plan for such a card says so.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from diptych.errors import RequestError
from diptych.planner.cards import Card

MEASURED = ("h200",)
"""Cards whose shares were measured; h100-80 has the same chip with slower memory."""

LINEAR, LINEAR_FP8 = 0.71, 0.77
ATTENTION = {128: 0.73, 64: 0.624}
"""On Hopper, by head size: the kernel without a maximum, in a forward."""
ATTENTION_FP8 = {128: 0.42, 64: 0.312}
"""With precision fp8: heads of 128 in int8, rounding counted as element-wise work; heads of 64 exact."""
FLASH = {128: 0.632, 64: 0.50}
"""cuDNN on an H200; the head size of 64 by the ratio of FlashAttention-3. For every card that is no Hopper."""
EFFICIENT = 0.5
"""Of `FLASH`, for cards that no flash kernel serves (T4): assumed, not measured."""
COPY = 0.856
ELEMENTWISE = 0.79
ELEMENTWISE_FP8 = 1.2
"""How much longer element-wise work takes where it also quantises."""
PLAIN = 10.8
"""And where no fused kernel runs: measured on Lite with and without them."""
SHORT, SHORT_HOPPER = 0.375, 0.5
"""Of the copy rate, for attention with one short side, which costs its bytes; on Hopper few keys have their kernel."""
LAUNCH = 0.5e-3
"""Seconds a fused block's kernels wait to be started, which no rate explains."""
LINK, BUS, PEER = 0.8, 0.78, 0.5
"""Of NVLink, assumed; of PCIe to the host, measured (49 GB/s into page-locked memory); of PCIe to a card, assumed."""
SLOWEST, FASTEST = 1e6, 1e21
"""Operations or bytes a second that a measurement may tell; what is beyond is none."""
LOCKED = 8e9
"""Bytes a second from memory that is not page-locked: assumed."""


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Operations and bytes a second of one card in 16 bit. attention: by head size. short: bytes a second of attention
    with one short side. link: sent to other ranks; bus: from the host. measured: whether all this was measured here.
    """

    linear: float
    linear_fp8: float
    attention: dict[int, float]
    attention_fp8: dict[int, float]
    copy: float
    elementwise: float
    short: float
    link: float
    bus: float
    fused: bool
    measured: bool

    @classmethod
    def of(cls, card: Card, link: float | None = None) -> Rates:
        """By data sheet and shares. link: bytes a second that a rank sends, where it is known better."""
        half, fp8, bandwidth = card.half * 1e12, (card.fp8 or 0.0) * 1e12, card.bandwidth * 1e12
        shares = ATTENTION if card.hopper else FLASH if card.bfloat16 else {k: EFFICIENT * v for k, v in FLASH.items()}
        return cls(
            linear=LINEAR * half,
            linear_fp8=LINEAR_FP8 * fp8,
            attention={size: share * half for size, share in shares.items()},
            attention_fp8={size: share * fp8 for size, share in ATTENTION_FP8.items()},
            copy=COPY * bandwidth,
            elementwise=ELEMENTWISE * bandwidth,
            short=(SHORT_HOPPER if card.hopper else SHORT) * COPY * bandwidth,
            link=link or (LINK if card.nvlink else PEER) * card.link * 1e9,
            bus=BUS * card.bus * 1e9,
            fused=card.bfloat16,
            measured=card.name in MEASURED,
        )

    def with_measured(self, found: dict[str, Any], where: str) -> Rates:
        """With what `diptych bench floors` wrote. Raises `RequestError` for a file of another kind."""
        try:
            rates = replace(
                self,
                linear=float(found["linear_tflops"]) * 1e12,
                attention={int(size): float(rate) * 1e12 for size, rate in found["attention_tflops"].items()},
                copy=float(found["copy_TBps"]) * 1e12,
                measured=True,
            )
            bus = found.get("host_GBps")
            speeds = (rates.linear, rates.copy, *rates.attention.values(), 1e9 * float(1 if bus is None else bus))
            sound = all(SLOWEST <= speed <= FASTEST for speed in speeds)
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            sound = False
        if not sound:
            raise RequestError("rates", where, "a file that `diptych bench floors --json` wrote")
        scale = rates.copy / self.copy
        rates = replace(rates, elementwise=self.elementwise * scale, short=self.short * scale)
        return rates if bus is None else replace(rates, bus=float(bus) * 1e9)

    def attention_of(self, head_dim: int, *, fp8: bool = False) -> float:
        """Of the nearest head size that there is a rate for."""
        known = self.attention_fp8 if fp8 else self.attention
        return known[min(known, key=lambda size: abs(size - head_dim))]
