"""What the transformer computes in 8 bits, as a user names it: all it can, or less in first steps and outer blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Self

from diptych.errors import RequestError

ACCEPTED = (
    "exact, fp8, fp8:1 for exact attention in the first step, or fp8:steps=1,first=2,last=2 for exact blocks "
    "at both ends too"
)


@dataclass(frozen=True)
class Precision:
    """`exact`, or `fp8`: products on video tokens in fp8 and video self-attention in int8, but for what is named.

    steps: first steps in which attention is exact all the same. first, last: how many fused blocks at the beginning
    and at the end compute as without fp8, in every step.
    """

    kind: Literal["exact", "fp8"] = "exact"
    steps: int = 0
    first: int = 0
    last: int = 0

    @classmethod
    def parse(cls, text: str) -> Self:
        """From `exact`, `fp8`, `fp8:N` (N steps), or `fp8:` with any of `steps=N`, `first=N` and `last=N`.

        Raises `RequestError` for another text.
        """
        if text == "exact":
            return cls()
        if text == "fp8":
            return cls("fp8")
        head, _, rest = text.partition(":") if isinstance(text, str) else ("", "", "")
        parts = [part.partition("=") for part in (rest if "=" in rest else f"steps={rest}").split(",")]
        given = {name: int(n) for name, _, n in parts if n.isascii() and n.isdecimal() and len(n) < 5}
        if head != "fp8" or len(given) != len(parts) or not given.keys() <= {"steps", "first", "last"}:
            raise RequestError("precision", text, ACCEPTED)
        return cls("fp8", **given)

    def __str__(self) -> str:
        named = {name: n for name, n in (("steps", self.steps), ("first", self.first), ("last", self.last)) if n}
        if not named:
            return self.kind
        if named.keys() == {"steps"}:
            return f"{self.kind}:{self.steps}"
        return f"{self.kind}:" + ",".join(f"{name}={n}" for name, n in named.items())

    def check(self, blocks: int) -> None:
        """Raise `RequestError` where a model of so many fused blocks has fewer than are to stay exact."""
        if self.first + self.last > blocks:
            raise RequestError(
                "precision", str(self), f"first and last together at most the {blocks} blocks of this model"
            )

    def quantised(self, blocks: int) -> range:
        """Which of so many fused blocks compute in fp8."""
        return range(self.first, max(blocks - self.last, self.first)) if self.kind == "fp8" else range(0)

    def spared(self, blocks: int) -> frozenset[int]:
        """Which do not, though fp8 was asked for."""
        return frozenset(range(blocks if self.kind == "fp8" else 0)) - frozenset(self.quantised(blocks))


EXACT, FP8 = Precision(), Precision("fp8")
