"""Where the error of int8 attention comes from: one head, queries and keys rounded one by one, on any machine.

    python benchmarks/int8_error.py [draws]

Random queries, keys and values of 51,840 tokens, normalised and rotated as the model does it, with random RMSNorm
weights; 48 queries of them attend in float32. About 5 s a draw on one core.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from diptych.attention.int8 import LARGEST, TOKENS, rounded_plainly, signs
from diptych.bench.forward import relative
from diptych.model import plain
from diptych.model.rope import rope_1d

S, QUERIES = 51_840, 48


def int8(x_SK: Tensor, *, turned: bool) -> Tensor:
    """Rounded with one scale for every 64 tokens: as `diptych.attention.int8` does it, or without the turn."""
    if turned:
        values, scale = rounded_plainly(x_SK[None, :, None])
        return values[0, :, 0].float() * scale[0, 0].repeat_interleave(TOKENS)[:, None]
    blocks = x_SK.unflatten(0, (-1, TOKENS))
    step = blocks.abs().amax((1, 2), keepdim=True) / LARGEST
    return ((blocks / step).round() * step).flatten(0, 1)


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.T / math.sqrt(q.shape[1]), -1) @ v


def draw(K: int, seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    rope = rope_1d(S, K, torch.device("cpu"))
    weights = [torch.randn(K).bfloat16() for _ in range(2)]
    q, k = (plain.norm_rotate(torch.randn(1, S, 1, K).bfloat16(), w, rope)[0, :, 0].float() for w in weights)
    v = torch.randn(S, K).bfloat16().float()
    picked = torch.randperm(S)[:QUERIES]
    turn = signs(K, torch.device("cpu")).float() / math.sqrt(K)
    turned_q, turned_k = q @ turn, k @ turn
    q8, k8 = int8(q, turned=True), int8(k, turned=True)
    exact = attend(q[picked], k, v)
    tried: dict[str, Callable[[], Tensor]] = {
        "queries": lambda: attend(q8[picked], turned_k, v),
        "keys": lambda: attend(turned_q[picked], k8, v),
        "both": lambda: attend(q8[picked], k8, v),
        "both, not turned": lambda: attend(int8(q, turned=False)[picked], int8(k, turned=False), v),
    }
    return {name: relative(call(), exact) for name, call in tried.items()}


def main() -> None:
    draws = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    for K in (128,):
        found = [draw(K, seed) for seed in range(draws)]
        print(f"heads of {K}, {draws} draws{'median':>30}{'mean':>8}{'worst':>8}")
        for name in found[0]:
            errors = [of_draw[name] for of_draw in found]
            told = (statistics.median(errors), statistics.mean(errors), max(errors))
            print(f"  {name:40}" + "".join(f"{error:8.4f}" for error in told))


if __name__ == "__main__":
    main()
