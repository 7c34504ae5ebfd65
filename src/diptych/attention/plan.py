"""Who holds which tokens and heads: whole numbers only, known before anything is computed.

S tokens lie on the ranks of a `Place` in rank order, uneven by any amount. Heads are dealt to the ranks of a Ulysses
group; the first `heads % U` ranks get one more, and a rank may get none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from diptych.attention.place import Place


def split(total: int, parts: int) -> tuple[int, ...]:
    """`total` in `parts` whole numbers that differ by at most one, the larger first."""
    each, more = divmod(total, parts)
    return tuple(each + (part < more) for part in range(parts))


class Span(NamedTuple):
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


def spans(sizes: tuple[int, ...]) -> tuple[Span, ...]:
    """Sizes laid end to end."""
    result, start = [], 0
    for size in sizes:
        result.append(Span(start, start + size))
        start += size
    return tuple(result)


@dataclass(frozen=True)
class Plan:
    """How a sequence lies on the ranks of `place`.

    lengths: tokens of each rank, ring-major.
    patches: for patch pipelining, the tokens of each rank in each patch, `patches[p][rank]`; a rank holds its parts of
    all patches one after the other. In the single-process order patch follows patch, and inside a patch rank follows
    rank; without patches rank follows rank.
    """

    place: Place
    lengths: tuple[int, ...]
    patches: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        assert len(self.lengths) == self.place.world, f"{len(self.lengths)} lengths for {self.place.world} ranks"
        assert all(length >= 0 for length in self.lengths), f"negative length in {self.lengths}"
        if self.patches:
            sums = tuple(sum(of_rank) for of_rank in zip(*self.patches, strict=True))
            assert sums == self.lengths, f"patches add up to {sums}, lengths are {self.lengths}"

    @classmethod
    def even(cls, place: Place, tokens: int) -> Plan:
        """`tokens` split as evenly as they go."""
        return cls(place, split(tokens, place.world))

    @classmethod
    def patched(cls, place: Place, patches: tuple[tuple[int, ...], ...]) -> Plan:
        """Patches of any lengths, `patches[p][rank]`."""
        return cls(place, tuple(sum(of_rank) for of_rank in zip(*patches, strict=True)), patches)

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def span(self) -> Span:
        """This rank's tokens in a sequence without patches."""
        assert not self.patches, "a rank's patches do not lie side by side in the sequence"
        return spans(self.lengths)[self.place.rank]

    def query_lengths(self, patch: int | None) -> tuple[int, ...]:
        """Tokens of each rank in this call: of one patch, or of all."""
        return self.lengths if patch is None else self.patches[patch]

    def in_ring(self, lengths: tuple[int, ...], ring_rank: int) -> tuple[int, ...]:
        """The part of `lengths` that belongs to the Ulysses group of a ring rank."""
        U = self.place.ulysses.size
        return lengths[ring_rank * U : (ring_rank + 1) * U]

    @property
    def ring_lengths(self) -> tuple[int, ...]:
        """Keys that each ring rank brings: the tokens of its Ulysses group."""
        return tuple(sum(self.in_ring(self.lengths, r)) for r in range(self.place.ring.size))

    def key_spans(self, ring_rank: int) -> tuple[Span, ...]:
        """Where the keys of a ring rank stand in the single-process order, in the order in which it holds them."""
        U = self.place.ulysses.size
        result, start = [], 0
        for lengths in self.patches or (self.lengths,):
            first = start + sum(lengths[: ring_rank * U])
            result.append(Span(first, first + sum(self.in_ring(lengths, ring_rank))))
            start += sum(lengths)
        return tuple(result)

    def patch_span(self, patch: int) -> Span:
        """Where a patch stands among the keys that this rank's Ulysses group holds."""
        sizes = tuple(sum(self.in_ring(lengths, self.place.ring.rank)) for lengths in self.patches)
        return spans(sizes)[patch]


class Heads(NamedTuple):
    """The heads of one Ulysses rank: its query heads, the key heads they read, and how often each of these is read.

    Key heads travel once however many query heads read them; neighbours may both need the same one.
    """

    q: Span
    kv: Span
    reads: tuple[int, ...]

    @property
    def uniform(self) -> bool:
        """Whether every key head is read equally often, as kernels for grouped queries expect."""
        return len(set(self.reads)) <= 1


def deal_heads(heads: int, kv_heads: int, ranks: int) -> tuple[Heads, ...]:
    """Heads of every Ulysses rank. `kv_heads` must divide `heads`."""
    if heads == 0:
        return (Heads(Span(0, 0), Span(0, 0), ()),) * ranks
    assert kv_heads > 0 and heads % kv_heads == 0, f"{kv_heads} key heads do not divide {heads} query heads"
    group = heads // kv_heads
    result = []
    for q in spans(split(heads, ranks)):
        if q.size == 0:
            result.append(Heads(q, Span(0, 0), ()))
            continue
        kv = Span(q.start // group, (q.stop - 1) // group + 1)
        reads = tuple(min(q.stop, (j + 1) * group) - max(q.start, j * group) for j in range(kv.start, kv.stop))
        result.append(Heads(q, kv, reads))
    return tuple(result)
