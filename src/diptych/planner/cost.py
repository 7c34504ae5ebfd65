"""Seconds of a forward and of a clip on one rank of a layout, from what must be computed, moved and sent."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from diptych.attention.place import Group, Place
from diptych.attention.plan import Plan
from diptych.attention.volume import attention_bytes, gather_bytes, merge_bytes
from diptych.codecs.tiles import SPACE, TIME, TilePlan
from diptych.memory.footprint import Parts, Setting, Size, transformer_weights
from diptych.model.config import TransformerConfig
from diptych.parallel.layout import Layout
from diptych.planner.rates import ELEMENTWISE_FP8, LAUNCH, LOCKED, PLAIN, Rates
from diptych.planner.work import Split, work

COLLECTIVE = 20e-6
"""Seconds before the first byte of a collective travels: assumed."""
WARMUP = 2
"""Steps that PipeFusion computes whole unless it is told otherwise."""
TEMPLATE = 129
"""Tokens of the template around a prompt."""
DECODE_OPERATIONS, DECODE_BYTES, DECODE_HOST = 17.2e6, 11.2e3, 6.6e-9
"""Of one decoded pixel: operations of the convolutions (at the rate of linear layers), bytes of what lies between them,
seconds on the host; fitted to 2.47 s for 175 frames of 864x480 in windows, of them 1.75 and 0.24 on the device."""


PLAIN_DECODE = 3.56
"""How much longer the device takes with diffusers' own decoder: 7.66 s of the same clip on an H200."""


@dataclass(frozen=True)
class Forward:
    """Seconds of one forward: what computes, then what of sending and streaming does not hide behind it."""

    linear: float
    self_attention: float
    other_attention: float
    elementwise: float
    launches: float
    exchange: float
    streaming: float

    @property
    def computing(self) -> float:
        return self.linear + self.self_attention + self.other_attention + self.elementwise + self.launches

    @property
    def total(self) -> float:
        return self.computing + self.exchange + self.streaming


@dataclass(frozen=True)
class Seconds:
    """Seconds of one clip from text to frames and samples; writing the MP4 is not counted. moving: weights that come
    from host memory once a clip."""

    text: float
    denoise: float
    decode: float
    moving: float

    @property
    def total(self) -> float:
        return float(sum(getattr(self, field.name) for field in fields(self)))


def forward(
    config: TransformerConfig, size: Size, setting: Setting, rates: Rates, *, exact_attention: bool = False
) -> Forward:
    """One forward on the rank that has the most to do. exact_attention: as in the first steps of some precisions."""
    c, s, n = config, setting, config.num_visual_blocks
    in_blocks = len(s.precision.quantised(n)) / max(n, 1)
    todo = work(c, size.tokens, size.A, size.L, s.itemsize, Split(s.ulysses, s.ring, s.tensor))
    own = -(-size.tokens // s.sequence)
    on_video = sum(2 * M * N * K * m for (M, N, K), m in todo.linears.items() if own == M and 4 * c.visual_in != K)
    linear = todo.linear_operations / rates.linear
    large = max(todo.attentions, key=lambda shape: shape[0] * shape[1])
    self_attention = n * 4 * math.prod(large) / rates.attention_of(c.head_dim)
    if in_blocks:
        in_fp8 = in_blocks * on_video
        linear = in_fp8 / rates.linear_fp8 + (todo.linear_operations - in_fp8) / rates.linear
    if in_blocks and not exact_attention:
        fast = n * 4 * math.prod(large) / rates.attention_of(c.head_dim, fp8=True)
        self_attention += in_blocks * (fast - self_attention)
    short = 0.0
    for (Q, S, H, K), count in todo.attentions.items():
        if large != (Q, S, H, K):
            moved, operations = 2 * s.itemsize * (Q + S) * H * K, 4 * Q * S * H * K
            short += count * max(moved / rates.short, operations / rates.attention_of(K))
    quantising = 1.0 + in_blocks * (ELEMENTWISE_FP8 - 1.0)
    elementwise = todo.bytes / rates.elementwise * quantising * (1.0 if rates.fused else PLAIN)
    launches = n * LAUNCH
    computing = linear + self_attention + short + elementwise + launches
    exchange = _exchange(c, size, s, rates)
    return Forward(linear, self_attention, short, elementwise, launches, exchange, _streaming(c, s, rates, computing))


def _exchange(c: TransformerConfig, size: Size, s: Setting, rates: Rates) -> float:
    """Seconds of sending. Nothing is taken as hidden, not even what a ring sends while it attends."""
    n, tokens, b = c.num_visual_blocks, size.tokens, s.itemsize
    own, heads = -(-tokens // s.sequence), -(-c.heads // s.tensor)
    a_block = whole = 0.0
    if s.sequence > 1:
        plan = Plan.even(Place(Group("", s.ring, 0), Group("", s.ulysses, 0), None), tokens)
        sent = attention_bytes(plan, heads=heads, kv_heads=heads, head_dim=c.head_dim, itemsize=b)
        a_block += sent / rates.link
        if s.ulysses > 1:  # packed before and unpacked after each of four tensors
            a_block += 2 * COLLECTIVE + 16 * own * c.model_dim * b / rates.copy / s.tensor
        if s.ring > 1:
            a_block += (s.ring - 1) * COLLECTIVE + merging(s.ring, b) * own * c.model_dim / s.tensor / rates.elementwise
        if size.A:
            merged = merge_bytes(s.sequence, queries=size.A, heads=c.heads_a, head_dim=c.head_dim, itemsize=b)
            a_block += merged / rates.link + COLLECTIVE
        whole += gather_bytes(plan, channels=4 * c.out_visual_dim, itemsize=b) / rates.link + COLLECTIVE
    if s.tensor > 1:  # the outputs of four products on video tokens are summed over the ranks
        summed = 2 * (s.tensor - 1) / s.tensor * own * c.model_dim * b
        a_block += 4 * (summed / rates.link + COLLECTIVE)
    if s.tensor * s.shard > 1 and s.modulation == "resident" and s.offload != "block":
        a_block += 8 * COLLECTIVE  # four modulations, whose rows lie on several ranks: inputs and results
    return n * a_block + whole


def merging(parts: int, itemsize: int) -> int:
    """Bytes that move through memory for each number of an attention merged from `parts` partial results.

    As `attention.merge_kernel` does it: the first merge reads two parts and writes their sum in float32, each further
    one reads a part and the sum and writes the sum, the last writes the result.
    """
    if parts == 2:
        return 3 * itemsize
    return (2 * itemsize + 4) + (parts - 3) * (itemsize + 4 + 4) + (itemsize + 4 + itemsize)


def _streaming(c: TransformerConfig, s: Setting, rates: Rates, computing: float) -> float:
    """Seconds of a forward in which it waits for weights, from the host or from the ranks that hold the other parts."""
    w = transformer_weights(c, s)
    waiting = 0.0
    if s.offload == "block":
        waiting += max(0.0, sum(w.streamed(s.resident)) / rates.bus - computing)
    if s.shard > 1:
        gathered = (s.shard - 1) * w.block / rates.link + COLLECTIVE
        waiting += w.blocks * max(0.0, gathered - computing / w.blocks) + gathered
    return waiting


def clip(
    config: TransformerConfig,
    size: Size,
    layout: Layout,
    setting: Setting,
    rates: Rates,
    parts: Parts,
    tiles: TilePlan,
) -> Seconds:
    """One clip: `size.steps` steps of `size.lanes` forwards, those of `cfg=2` at once.

    Without guidance there is one forward a step, which both halves compute alike.
    """
    exact = min(setting.precision.steps, size.steps)
    usual = forward(config, size, setting, rates).total
    first = forward(config, size, setting, rates, exact_attention=True).total if exact else usual
    forwards = [first] * exact + [usual] * (size.steps - exact)
    steps = sum(forwards) * _in_turn(size, layout)
    if layout.pipeline > 1:
        steps = _piped(config, size, layout, setting, rates, forwards)
    if layout.cfg > 1 and size.lanes > 1:
        velocities = size.T * size.Y * size.X * config.out_visual_dim + size.A * config.out_audio_dim
        steps += size.steps * (velocities * setting.itemsize / rates.link + COLLECTIVE)
    read = (size.L + TEMPLATE) * parts.language / rates.linear  # two operations a weight, two bytes a weight
    held = parts.in_text_precision(setting.text_precision, setting.itemsize)
    copied = parts.language if setting.text_precision == "exact" else held.language + 2 * parts.language
    text = size.lanes * max(read, copied / rates.copy)  # rounded weights are read, written whole, and read again
    return Seconds(text, steps, decode(tiles, layout.world, rates), _moving(config, setting, rates, held))


def _in_turn(size: Size, layout: Layout) -> int:
    """Forwards of a step that one half of the ranks computes."""
    return -(-size.lanes // layout.cfg)


def _piped(c: TransformerConfig, size: Size, layout: Layout, s: Setting, rates: Rates, forwards: list[float]) -> float:
    """Seconds of all steps through P stages, by PipeFusion's defaults: the first steps whole, then in 2 P patches.

    Units of work follow each other: n of them pass P stages in n + P - 1 turns. Every stage sends on what it made.
    """
    P, lanes = layout.pipeline, _in_turn(size, layout)
    sent = -(-size.tokens // s.sequence) * c.model_dim * s.itemsize / rates.link

    def turns(seconds: float, patches: int) -> float:
        return (lanes * patches + P - 1) * ((seconds / P + sent) / patches + COLLECTIVE)

    return sum(turns(seconds, 1 if step < WARMUP else 2 * P) for step, seconds in enumerate(forwards))


def decode(tiles: TilePlan, ranks: int, rates: Rates) -> float:
    """Seconds of decoding a picture whose tiles are dealt to `ranks` ranks."""
    pixels = sum((TIME * (t.t.latents - 1) + 1) * (SPACE * t.y.latents) * (SPACE * t.x.latents) for t in tiles.tiles)
    rounds = -(-len(tiles.tiles) // ranks)
    device = DECODE_OPERATIONS / rates.linear + DECODE_BYTES / rates.elementwise
    slower = 1.0 if rates.fused else PLAIN_DECODE
    return pixels * (rounds / len(tiles.tiles) * slower * device + DECODE_HOST)


def _moving(c: TransformerConfig, s: Setting, rates: Rates, parts: Parts) -> float:
    w = transformer_weights(c, s)
    tables = s.modulation == "tables" or s.offload == "block"
    seconds = w.modulation / LOCKED if tables else 0.0
    if s.offload == "none":
        return seconds
    once = parts.total + w.outer + (sum(w.each) if s.offload == "model" else 0)
    return seconds + once / rates.bus
