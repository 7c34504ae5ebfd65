"""Bytes on one device while a clip is made, phase by phase: computed from shapes, without torch and without weights.

What is counted, and where each number is from, stands in docs/memory.md. A phase holds `weights` all the while and
`work` at its peak. Sizes are what torch's allocator is asked for; the CUDA context (about 0.5 GiB) comes on top.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

from diptych.attention.plan import spans, split
from diptych.memory.precision import EXACT, Precision
from diptych.model.config import TransformerConfig
from diptych.model.keys import Shape, stays_as_stored, transformer_keys

GIB = 1 << 30
MIB = 1 << 20

Offload = Literal["none", "model", "block"]
TextPrecision = Literal["exact", "8bit", "nf4"]

SLOTS = 2
"""Blocks in flight with `offload="block"`: one at work, one on its way."""
WORKSPACE = 140 * MIB
"""What matrix products and attention kernels keep for themselves: measured on an H200, peak less all that is named."""
SOUND_WORK = 512 * MIB
"""Audio VAE and vocoder on ten seconds of sound, float32: an upper bound."""

BLOCK = "visual_transformer_blocks."
VIDEO_LINEARS = (
    *(f"video_dec_block.self_attention.{name}" for name in ("to_query", "to_key", "to_value", "out_layer")),
    *(f"video_dec_block.cross_attention.{name}" for name in ("to_query", "out_layer")),
    *(f"va_cross_attention.{name}" for name in ("to_query", "out_layer")),
    *(f"av_cross_attention.{name}" for name in ("to_key", "to_value")),
    "video_dec_block.feed_forward.net.0.proj",
    "video_dec_block.feed_forward.net.2",
)
"""Layers of a fused block that take video tokens: those that fp8 quantises."""


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a forward computes on: T x Y x X latents (the tail counted in `T`), A audio latents, L text tokens.

    batch: clips in one forward. lanes: 2 with guidance. steps: of the request, for modulation tables.
    """

    T: int
    Y: int
    X: int
    A: int = 0
    L: int = 200
    batch: int = 1
    lanes: int = 1
    steps: int = 1

    @property
    def tokens(self) -> int:
        return self.T * (self.Y // 2) * (self.X // 2)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Bytes of the weights around the transformer, as they are held on the device.

    language_layer, language_layers: bytes and number of its layers, which are streamed where it does not fit whole.
    language_products: (out, in) of the products of one layer: the weights that a text precision rounds.
    """

    language: int
    language_layer: int
    language_layers: int
    clip: int
    vae: int
    sound: int
    language_products: tuple[tuple[int, int], ...] = ()

    @property
    def total(self) -> int:
        return self.language + self.clip + self.vae + self.sound

    def in_text_precision(self, precision: TextPrecision, itemsize: int) -> Parts:
        """The same with the products of the language model rounded, where they are of `itemsize` bytes now."""
        if precision == "exact":
            return self
        saved = sum(
            itemsize * rows * width - quantised_bytes(rows, width, precision) for rows, width in self.language_products
        )
        language = self.language - saved * self.language_layers
        return replace(self, language=language, language_layer=self.language_layer - saved)


def quantised_bytes(rows: int, width: int, precision: TextPrecision) -> int:
    """Of one weight: a byte a number and a float32 a row, or half a byte a number and a float32 for each 64."""
    count = rows * width
    return count + 4 * rows if precision == "8bit" else -(-count // 2) + 4 * -(-count // 64)


RELEASED = Parts(
    language=2 * 7_070_619_136,
    language_layer=2 * 233_057_792,
    language_layers=28,
    clip=4 * 123_060_480,
    vae=2 * 246_478_803,
    sound=4 * (305_613_186 + 122_155_368),
    language_products=(*2 * ((3584, 3584), (512, 3584)), *2 * ((18_944, 3584),), (3584, 18_944)),
)
"""Of the released checkpoints: language model in bfloat16, video VAE in float16, CLIP and sound in float32."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How it is run.

    itemsize: bytes of the working dtype. modulation_itemsize: of the modulation weights as stored (4 in base models, 2
    in distilled ones). fused: whether the element-wise kernels run (half precision, Ampere or newer).
    resident: fused blocks that stay with `offload="block"`; two more are always in flight. language_streamed: the
    language model too comes layer by layer. chunks: parts in which the feed-forward on video tokens runs.
    cfg, ulysses, ring, tensor, shard, pipeline: the axes of the layout, under their names there.
    kept: tensors of the size of the video stream that a step cache holds.
    """

    itemsize: int = 2
    precision: Precision = EXACT
    text_precision: TextPrecision = "exact"
    modulation: Literal["resident", "tables"] = "resident"
    modulation_itemsize: int = 4
    fused: bool = True
    offload: Offload = "none"
    resident: int = 0
    language_streamed: bool = False
    chunks: int = 1
    cfg: int = 1
    ulysses: int = 1
    ring: int = 1
    tensor: int = 1
    shard: int = 1
    pipeline: int = 1
    kept: int = 0

    @property
    def sequence(self) -> int:
        return self.ulysses * self.ring


@dataclass(frozen=True)
class Phase:
    """Bytes of one phase. The weights are there from its start to its end; `work` is the most of everything else."""

    weights: int
    work: int

    @property
    def peak(self) -> int:
        return self.weights + self.work


@dataclass(frozen=True)
class Footprint:
    """Phases by name: `text`, `denoise`, `picture`, `sound`; host: weights that wait in host memory."""

    phases: Mapping[str, Phase]
    host: int = 0

    @property
    def peak(self) -> int:
        return max(phase.peak for phase in self.phases.values())

    @property
    def widest(self) -> str:
        """The phase that needs the most."""
        return max(self.phases, key=lambda name: self.phases[name].peak)


@dataclass(frozen=True)
class TransformerWeights:
    """Bytes of a transformer as one rank holds it: `outer` around the fused blocks, and of each of these in turn.

    modulation: of outer parts and all blocks together; it is counted in neither of them. towers: the part of `outer`
    that is the blocks of the text towers, which `tensor` and `shard` split as they do the fused ones.
    """

    outer: int
    each: tuple[int, ...]
    modulation: int
    towers: int = 0

    @property
    def blocks(self) -> int:
        return len(self.each)

    @property
    def block(self) -> int:
        """The largest: blocks that stay exact beside others in fp8 are."""
        return max(self.each, default=0)

    @property
    def total(self) -> int:
        return self.outer + sum(self.each) + self.modulation

    def streamed(self, resident: int) -> list[int]:
        """The bytes of the blocks that stream when `resident` stay."""
        return [self.each[n] for n in streamed(self.blocks, resident)]

    def held(self, resident: int) -> int:
        """Bytes of blocks on the device when `resident` stay: those, and the slots that the others share."""
        moving = self.streamed(resident)
        return sum(self.each) - sum(moving) + SLOTS * max(moving, default=0)


def streamed(layers: int, resident: int) -> list[int]:
    """Which of so many layers come and go when `resident` stay, evenly spread; none where the slots hold the rest."""
    moving = 0 if resident + SLOTS >= layers else layers - max(resident, 0)
    return [n for n in range(layers) if (n + 1) * moving // layers > n * moving // layers]


def transformer_weights(config: TransformerConfig, setting: Setting) -> TransformerWeights:
    """From the names and shapes of the checkpoint's tensors."""
    whole = _weights(config, setting.itemsize, setting.precision, setting.modulation_itemsize)
    stages = [whole.each[span.start : span.stop] for span in spans(split(whole.blocks, setting.pipeline))]
    share = setting.tensor * setting.shard
    each = tuple(-(-block // share) for block in max(stages, key=sum))  # all ranks plan for the one that holds the most
    towers = -(-whole.towers // share)
    outer = whole.outer - whole.towers + towers
    return TransformerWeights(outer, each, -(-whole.modulation // share), towers)


@lru_cache(maxsize=64)
def _weights(
    config: TransformerConfig, itemsize: int, precision: Precision, modulation_itemsize: int
) -> TransformerWeights:
    """On one rank. Kept, because a planner asks many times."""
    outer = modulation = towers = 0
    blocks = [0] * config.num_visual_blocks
    quantised = {f"{BLOCK}{n}.{layer}.weight" for n in precision.quantised(len(blocks)) for layer in VIDEO_LINEARS}
    for name, shape in transformer_keys(config).items():
        size = _stored(name, shape, itemsize, modulation_itemsize, fp8=name in quantised)
        if "modulation" in name:
            modulation += size
        elif name.startswith(BLOCK):
            blocks[int(name.split(".")[1])] += size
        else:
            outer += size
            towers += size if "_text_transformer_blocks." in name else 0
    return TransformerWeights(outer, tuple(blocks), modulation, towers)


def activations(config: TransformerConfig, size: Size, setting: Setting) -> dict[str, int]:
    """Bytes at the widest point of each part of a fused block, beside the weights.

    `attention`, `feed_forward`: in units of one video stream u = B s D itemsize, with n the normed input of a product
    (u, or half of it in fp8 of a 2-byte dtype): attention u + n + q, k, v + output; feed-forward u + n + inner + u;
    of the blocks in fp8 and those that stay exact what takes more.
    `sampler`: latents, velocities, modulations and rotary tables, all there all the while.
    """
    quantised = len(setting.precision.quantised(config.num_visual_blocks))
    kinds = [_block_activations(config, size, setting, fp8=True)] if quantised else []
    if quantised < config.num_visual_blocks or not kinds:
        kinds.append(_block_activations(config, size, setting, fp8=False))
    cells = size.batch * size.T * size.Y * size.X
    sampler = 4 * cells * (4 * config.in_visual_dim + config.visual_in + 4 * config.out_visual_dim)
    sampler += 4 * size.tokens * config.head_dim
    sampler += modulation_bytes(config) * size.batch * tables_held(size, setting)
    return {name: max(kind[name] for kind in kinds) for name in kinds[0]} | {"sampler": sampler}


def _block_activations(config: TransformerConfig, size: Size, setting: Setting, *, fp8: bool) -> dict[str, int]:
    """`attention` and `feed_forward` of a block in fp8, or of one without."""
    c = config
    tokens = -(-size.tokens // setting.sequence) * size.batch
    u = tokens * c.model_dim * setting.itemsize
    n = tokens * (c.model_dim + 4) if fp8 else u
    inner_width = -(-c.ff_dim // setting.tensor)
    inner = -(-tokens // setting.chunks) * inner_width * setting.itemsize
    qkv = 3 * u // setting.tensor
    held = u + (u * setting.kept + u if setting.kept else 0)
    attention = held + n + qkv + u // setting.tensor
    if fp8 and c.head_dim == 128:  # queries and keys in int8 beside themselves
        attention += 2 * qkv // (3 * setting.itemsize)
    if setting.ulysses > 1:
        attention = max(attention, held + n + 4 * qkv)
    if setting.ring > 1:
        attention = held + n + qkv + (qkv if setting.ulysses > 1 else 0) + 9 * u // setting.tensor
    if fp8:
        feed_forward = held + n + inner + inner // setting.itemsize
        feed_forward = max(feed_forward, held + n + inner // setting.itemsize + u)
    else:
        feed_forward = held + n + inner + u
    if setting.chunks > 1:  # the output of all parts stands beside that of the present one
        feed_forward = held + n + inner + (inner // setting.itemsize if fp8 else u // setting.chunks) + u
    if not setting.fused:  # plain torch makes float32 copies on the way
        wide = tokens * c.model_dim * 4
        attention = max(attention, held + u + n + qkv + 3 * wide)
        feed_forward = max(feed_forward + inner + u, held + u + 3 * wide)
    side = size.batch * setting.itemsize * 12 * (size.A * c.model_dim_a + size.L * (c.model_dim + c.model_dim_a))
    return {"attention": attention + side, "feed_forward": feed_forward + side}


def modulation_bytes(config: TransformerConfig) -> int:
    """Float32 modulations of one clip, step and lane: what a table holds, and what every forward has."""
    c = config
    D, Da = c.model_dim, c.model_dim_a
    return 4 * (c.num_visual_blocks * 12 * (D + Da) + c.num_text_blocks * 6 * (D + Da) + 2 * (D + Da))


def kept_keys(config: TransformerConfig, size: Size, setting: Setting) -> int:
    """What PipeFusion keeps from step to step: keys and values of both attentions to video tokens, of each held block
    in each pass of guidance on this rank."""
    if setting.pipeline == 1:
        return 0
    held = -(-config.num_visual_blocks // setting.pipeline) * -(-size.lanes // setting.cfg)
    own = -(-size.tokens // setting.sequence) * size.batch
    heads = -(-config.heads // setting.tensor) + -(-config.heads_a // setting.tensor)
    return held * 2 * own * heads * config.head_dim * setting.itemsize


def tables_held(size: Size, setting: Setting) -> int:
    """Modulation sets on the device: offloaded tables wait on the host and come one forward at a time."""
    whole = setting.modulation == "tables" and setting.offload == "none"
    return size.steps * size.lanes if whole else 1


def text_work(config: TransformerConfig, size: Size, setting: Setting, parts: Parts) -> int:
    """The language model on a prompt and its template of 129 tokens: three inner tensors, which in Qwen2.5-VL-7B are
    37/7 of the width, and the streams around them. A weight that is held rounded is made whole to multiply with it."""
    width = config.in_text_dim
    whole = 0
    if setting.text_precision != "exact":
        whole = max((rows * width for rows, width in parts.language_products), default=0)
    return setting.itemsize * (size.batch * (size.L + 129) * (3 * width * 37 // 7 + 12 * width) + whole)


def footprint(
    config: TransformerConfig,
    size: Size,
    setting: Setting,
    *,
    decode: int,
    parts: Parts = RELEASED,
    first: bool = True,
) -> Footprint:
    """Bytes by phase on one rank.

    decode: peak bytes of decoding the picture with the weights of the video VAE in it, as `codecs.tiles` tells.
    first: whether this rank also reads texts and makes sound; the others hold the transformer and the video VAE.
    parts: as they are without `setting.text_precision`, which is applied here.
    """
    parts = parts.in_text_precision(setting.text_precision, setting.itemsize)
    w = transformer_weights(config, setting)
    # Gathered blocks, as FSDP2 holds them: the one at work, the next one, and what the next arrives in.
    gathered = 3 * w.block * setting.shard if setting.shard > 1 else 0
    gathered += kept_keys(config, size, setting)
    on_host = setting.modulation == "tables" or setting.offload == "block"
    modulation = 0 if on_host else w.modulation
    work = activations(config, size, setting)
    denoise_work = WORKSPACE + work["sampler"] + max(work["attention"], work["feed_forward"])
    others = parts.total if first else parts.vae
    if setting.offload == "none":
        weights = w.outer + sum(w.each) + modulation + others
        phases = {
            "denoise": Phase(weights, denoise_work + gathered),
            "picture": Phase(weights - parts.vae, decode),
        }
        if first:
            phases["text"] = Phase(weights, WORKSPACE + text_work(config, size, setting, parts))
            phases["sound"] = Phase(weights, SOUND_WORK)
        return Footprint(phases, w.modulation - modulation)
    if setting.offload == "block":
        held = w.outer + w.held(setting.resident)
    else:
        held = w.outer + sum(w.each) + modulation
    phases = {"denoise": Phase(held, denoise_work + gathered), "picture": Phase(0, decode)}
    if first:
        language = parts.language
        if setting.language_streamed:
            language -= max(parts.language_layers - SLOTS, 0) * parts.language_layer
        phases["text"] = Phase(language + parts.clip, WORKSPACE + text_work(config, size, setting, parts))
        phases["sound"] = Phase(parts.sound + parts.vae, SOUND_WORK)
    return Footprint(phases, w.total + others)


def _stored(name: str, shape: Shape, itemsize: int, modulation_itemsize: int, *, fp8: bool) -> int:
    count = math.prod(shape)
    if "modulation" in name:
        return count * modulation_itemsize
    if stays_as_stored(name):
        return 4 * count
    return count + 4 * shape[0] if fp8 else itemsize * count
