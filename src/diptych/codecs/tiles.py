"""Which parts of the latents are decoded together: an explicit list, a pure function of shape, budget and cost.

Nothing here looks at a device or at free memory, so the same clip is cut in the same way everywhere, and the list can
be dealt to ranks. Units: latents are cells of the latent video; positions are frames, rows or columns of the picture.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, product

from diptych.errors import RequestError

TIME, SPACE = 4, 8
"""Compression of the video VAE: T latent frames make 4 (T - 1) + 1 frames, one latent row or column makes 8."""

WINDOW, STRIDE, UNTILED = 5, 3, 4
"""diffusers' default windows in time: 5 latents every 3, unless the whole clip has at most 4."""

OVERLAP = 8
"""Latents that neighbours in space share at least: 64 pixels, as in diffusers."""
SMALLEST = 16
"""Latents a side that a tile in space has at least: group norm takes its statistics per tile."""

GIB = 1 << 30


@dataclass(frozen=True)
class Span:
    """A tile along one axis: latents `first..last` are decoded, `drop` positions at their start are left out, the
    others are positions `low..high` of the result. The first `rise` and the last `fall` of those are shared with the
    neighbours and blended linearly: position i of a rise counts i / rise, the neighbour's fall 1 - i / rise.
    """

    first: int
    last: int
    drop: int
    low: int
    high: int
    rise: int
    fall: int

    @property
    def latents(self) -> int:
        return self.last - self.first


@dataclass(frozen=True)
class Tile:
    t: Span
    y: Span
    x: Span


@dataclass(frozen=True)
class TilePlan:
    """Tiles of a (T, Y, X) latent video, ordered by time, then row, then column; results are blended in this order."""

    T: int
    Y: int
    X: int
    tiles: tuple[Tile, ...]

    @property
    def frames(self) -> int:
        return TIME * (self.T - 1) + 1

    @property
    def height(self) -> int:
        return SPACE * self.Y

    @property
    def width(self) -> int:
        return SPACE * self.X


@dataclass(frozen=True)
class TileCost:
    """A linear model of the peak bytes of a decode, so that a budget can be held without measuring.

    fixed: whatever the tile. per_pixel: times frames x rows x columns that one tile decodes. per_pair: times the
    squared number of latents of one tile, for the dense causal mask of the middle attention. Pixels and pairs peak
    at different times, so the greater counts. The canvas is one float32 window of the whole picture.
    """

    fixed: float
    per_pixel: float
    per_pair: float

    def peak(self, t: int, y: int, x: int, height: int, width: int) -> float:
        """Bytes while tiles of t x y x x latents are decoded for a picture of height x width pixels."""
        frames = TIME * (t - 1) + 1
        pixels = frames * (SPACE * y) * (SPACE * x)
        canvas = 12 * frames * height * width
        return self.fixed + canvas + max(self.per_pixel * pixels, self.per_pair * (t * y * x) ** 2)


_ANCHORS = ((17 * 256 * 256, 4.7 * GIB), (17 * 480 * 864, 23.5 * GIB))
"""Measured peaks of the released VAE in fp16 on an H200: diffusers' 256-pixel tiles, and no tiles in space."""


def released_cost(scale: float = 1.0, itemsize: int = 2) -> TileCost:
    """The cost of the released VAE: the line through two measured peaks, less the canvas that is counted apart.

    scale: width of this VAE's last two stages over the released 384 channels. itemsize: bytes of its dtype; the
    anchors are fp16. The mask is one float32 beside its bool, or beside its cast: computed from diffusers' source.
    """
    (few, low), (many, high) = _ANCHORS
    per_pixel = (high - low) / (many - few)
    fixed = low - per_pixel * few - 12 * many
    factor = scale * itemsize / 2
    return TileCost(fixed * factor, per_pixel * factor, per_pair=5 if itemsize == 4 else 4 + itemsize)


def fused_cost(width: int = 256) -> TileCost:
    """The cost of our own kernels: the line through 9.23 GiB for 17 frames of 480x864 and 5.42 GiB for 17 of 480x464,
    measured on an H200 with the released widths in half precision. Nothing is held twice but the weights, which the
    kernels want in an order of their own, and no mask is made; what grows with pairs is one frame's scores.

    width: channels of the last stage's input.
    """
    return TileCost(fixed=0.91 * GIB, per_pixel=1256 * width / 256, per_pair=2)


def plan_tiles(T: int, Y: int, X: int, budget: int | None = None, cost: TileCost | None = None) -> TilePlan:
    """The plan for T x Y x X latents.

    Without a budget, or with one that suffices, exactly what diffusers does by default: windows in time, none in
    space. (diffusers also decodes a last window that adds no frame; it is left out.) With a smaller budget in bytes,
    evenly spread tiles in space too: the grid that fits and decodes the fewest latents.

    Raises `RequestError` when the smallest tiles exceed the budget, naming what would do.
    """
    assert min(T, Y, X) >= 1
    cost = cost or released_cost()
    windows = _windows(T)
    longest = max(span.latents for span in windows)
    best, needed = None, float("inf")
    for rows, columns in _grids_of(Y, X):
        peak = cost.peak(longest, rows[0].latents, columns[0].latents, SPACE * Y, SPACE * X)
        needed = min(needed, peak)
        tiles = len(rows) * len(columns)
        rank = (tiles * rows[0].latents * columns[0].latents, tiles, len(rows))
        if (budget is None or peak <= budget) and (best is None or rank < best[0]):
            best = (rank, rows, columns)
    if best is None:
        raise RequestError(
            "decode_memory",
            f"{(budget or 0) / GIB:.4g}GiB",
            f"a picture of {SPACE * X}x{SPACE * Y} takes at least {needed / GIB:.2f} GiB in its smallest tiles",
        )
    _, rows, columns = best
    return TilePlan(T, Y, X, tuple(Tile(t, y, x) for t in windows for y in rows for x in columns))


def decode_peak(T: int, Y: int, X: int, budget: int | None = None, cost: TileCost | None = None) -> int:
    """Bytes that decoding takes by the plan for `budget`; where no plan fits that, the least that would do."""
    cost = cost or released_cost()
    try:
        tile = plan_tiles(T, Y, X, budget, cost).tiles[0]
        sides = [(tile.y.latents, tile.x.latents)]
    except RequestError:
        sides = [(rows[0].latents, columns[0].latents) for rows, columns in _grids_of(Y, X)]
    longest = max(span.latents for span in _windows(T))
    return int(min(cost.peak(longest, y, x, SPACE * Y, SPACE * X) for y, x in sides)) + 1


def whole_plan(T: int, Y: int, X: int) -> TilePlan:
    """One tile, no seams: what the VAE would make of the whole clip, at the memory of the whole clip."""
    frames = TIME * (T - 1) + 1
    t = Span(0, T, 0, 0, frames, 0, 0)
    return TilePlan(T, Y, X, (Tile(t, *(Span(0, n, 0, 0, SPACE * n, 0, 0) for n in (Y, X))),))


def _windows(T: int) -> list[Span]:
    """Windows in time. A later window drops the frame of its first latent: only the first latent makes one frame."""
    if T <= UNTILED:
        return [Span(0, T, 0, 0, TIME * (T - 1) + 1, 0, 0)]
    starts = [s for s in range(0, T, STRIDE) if s == 0 or T - s > 1]
    spans = []
    for s in starts:
        last = min(s + WINDOW, T)
        low = TIME * s + 1 if s else 0
        rise, fall = TIME * bool(s), TIME * (s != starts[-1])
        spans.append(Span(s, last, int(s > 0), low, TIME * (last - 1) + 1, rise, fall))
    return spans


def _grids_of(Y: int, X: int) -> Iterator[tuple[list[Span], list[Span]]]:
    return product(_grids(Y), _grids(X))


def _grids(latents: int) -> Iterator[list[Span]]:
    """One, two, three ... equal tiles over an axis, evenly spread, as long as at most two of them meet anywhere."""
    count = 1
    while True:
        size = -(-(latents + (count - 1) * OVERLAP) // count)
        if count > 1 and size < SMALLEST:
            return
        starts = [i * (latents - size) // max(count - 1, 1) for i in range(count)]
        if any(later < earlier + size for earlier, later in zip(starts, starts[2:], strict=False)):
            return
        shared = [0, *(SPACE * (a + size - b) for a, b in pairwise(starts)), 0]
        yield [
            Span(s, s + size, 0, SPACE * s, SPACE * (s + size), shared[i], shared[i + 1]) for i, s in enumerate(starts)
        ]
        count += 1
