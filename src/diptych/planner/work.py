"""The two numbers of one forward, operations and bytes: of one rank, alone or among others. Counted, not measured."""

from __future__ import annotations

from dataclasses import dataclass, field

from diptych.model.config import TransformerConfig


@dataclass(frozen=True)
class Work:
    """What one forward must do at least.

    linears: (tokens, width out, width in) to how often; attentions: (queries, keys, heads, head size) to how often;
    bytes: device memory that element-wise work must move, each input read once and each output written once.
    """

    linears: dict[tuple[int, int, int], int] = field(default_factory=dict)
    attentions: dict[tuple[int, int, int, int], int] = field(default_factory=dict)
    bytes: int = 0

    @property
    def linear_operations(self) -> int:
        return sum(2 * M * N * K * count for (M, N, K), count in self.linears.items())

    @property
    def attention_operations(self) -> int:
        return sum(4 * Q * S * H * K * count for (Q, S, H, K), count in self.attentions.items())


@dataclass(frozen=True)
class Split:
    """How many ranks share one forward: Ulysses splits heads too, a ring only tokens, tensor heads and products."""

    ulysses: int = 1
    ring: int = 1
    tensor: int = 1


ELEMENTWISE_PASSES = 26
"""Reads and writes of one (S, D) tensor a fused block cannot do without, with one kernel between any two products:
two norms with residual (4 each), one more (4), the first norm (2), the last residual (3), queries and keys of the
self-attention (4), queries of both cross-attentions (2 each), and the keys for audio (2, half as wide: 1)."""


def work(config: TransformerConfig, S: int, A: int, L: int, itemsize: int = 2, split: Split | None = None) -> Work:
    """Operations and bytes of one forward of S video, A audio and L text tokens, batch 1; A = 0 is without sound.

    split: the same for the rank that has the most to do, where several share the forward.
    """
    c, n, share = config, config.num_visual_blocks, split or Split()
    D, Da, H, Ha, K, R = c.model_dim, c.model_dim_a, c.heads, c.heads_a, c.head_dim, share.tensor
    s = -(-S // (share.ulysses * share.ring))
    linears: dict[tuple[int, int, int], int] = {}

    def add(M: int, N: int, width: int, count: int) -> None:
        if M:
            linears[M, N, width] = linears.get((M, N, width), 0) + count

    streams = ((s, D, -(-D // R), c.ff_dim), (A, Da, -(-Da // R), c.ff_dim_a))
    for tokens, d, part, ff in streams:
        add(tokens, part, d, 5 * n)  # self: q, k, v; text: q; cross-modal: q
        add(tokens, d, part, 3 * n)  # their outputs
        add(tokens, -(-ff // R), d, n)
        add(tokens, d, -(-ff // R), n)
        if tokens:
            add(L, part, d, 2 * n)  # keys and values of the text
    if A:
        add(s, -(-Da // R), D, 2 * n)
        add(A, -(-D // R), Da, 2 * n)
    for d, ff in ((D, c.ff_dim), (Da, c.ff_dim_a))[: 2 if A else 1]:
        add(L, d, d, 4 * c.num_text_blocks)
        add(L, ff, d, c.num_text_blocks)
        add(L, d, ff, c.num_text_blocks)
    add(s, D, 4 * c.visual_in, 1)
    add(s, 4 * c.out_visual_dim, D, 1)
    add(A, c.out_audio_dim, Da, 1)
    heads, heads_a = -(-H // R), -(-Ha // R)
    attentions = {
        (min(s * share.ulysses, S), S, -(-H // (share.ulysses * R)), K): n,
        (s, L, heads, K): n,
    }
    if A:
        attentions |= {(s, A, heads, K): n, (A, s, heads_a, K): n, (A, A, heads_a, K): n, (A, L, heads_a, K): n}
    gelu = 2 * s * -(-c.ff_dim // R)
    return Work(linears, attentions, itemsize * n * (ELEMENTWISE_PASSES * s * D + gelu))
