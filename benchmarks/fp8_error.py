"""Where the error of fp8 attention comes from: one head, operands rounded to e4m3 one by one, on any machine.

    python benchmarks/fp8_error.py [draws]

Random queries, keys and values of 51,840 tokens, normalised and rotated as the model does it, with random RMSNorm
weights; 48 queries of them attend in float32. Softmax weights are rounded as FlashAttention-3 rounds them. About
10 s a draw on one core.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable

import torch
from torch import Tensor

from diptych.attention.fp8 import quantise
from diptych.bench.forward import relative
from diptych.model import plain
from diptych.model.rope import rope_1d

S, QUERIES = 51_840, 48


def e4m3(x: Tensor, *, smooth: bool = False, rotate: bool = False) -> Tensor:
    """(S, K) rounded with one scale for all; turned, if so, and without the centre."""
    values, scale, _ = quantise(x[None, :, None], smooth=smooth, rotate=rotate)
    return (values.float() * scale[:, None, :, None])[0, :, 0]


def int8(x: Tensor) -> Tensor:
    step = x.abs().amax(-1, keepdim=True) / 127
    return (x / step).round() * step


def two_terms(x: Tensor) -> Tensor:
    return e4m3(x) + e4m3(x - e4m3(x))


def attend(q: Tensor, k: Tensor, v: Tensor, *, rounded: bool = False) -> Tensor:
    scores = q @ k.T / math.sqrt(q.shape[1])
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    if rounded:
        weights = (weights * 256).to(torch.float8_e4m3fn).float() / 256
    return weights @ v / total


def draw(K: int, seed: int) -> dict[str, float]:
    torch.manual_seed(seed)
    rope = rope_1d(S, K, torch.device("cpu"))
    weights = [torch.randn(K).bfloat16() for _ in range(2)]
    q, k = (plain.norm_rotate(torch.randn(1, S, 1, K).bfloat16(), w, rope)[0, :, 0].float() for w in weights)
    v = torch.randn(S, K).bfloat16().float()
    picked = torch.randperm(S)[:QUERIES]
    k = k - k.mean(0)  # softmax does not see it
    q8, k8, v8 = e4m3(q)[picked], e4m3(k), e4m3(v)
    turned = e4m3(q, rotate=True)[picked], e4m3(k, rotate=True)
    alone = q[picked]
    exact = attend(alone, k, v)
    tried: dict[str, Callable[[], Tensor]] = {
        "queries": lambda: attend(q8, k, v),
        "keys": lambda: attend(alone, k8, v),
        "values": lambda: attend(alone, k, v8),
        "softmax weights": lambda: attend(alone, k, v, rounded=True),
        "all four": lambda: attend(q8, k8, v8, rounded=True),
        "all four, queries and keys turned": lambda: attend(*turned, v8, rounded=True),
        "values and weights": lambda: attend(alone, k, v8, rounded=True),
        "all four, queries in two terms": lambda: attend(two_terms(q)[picked], k8, v8, rounded=True),
        "all four, values in two terms": lambda: attend(q8, k8, two_terms(v), rounded=True),
        "all four, both in two terms": lambda: attend(two_terms(q)[picked], k8, two_terms(v), rounded=True),
        "all four, queries and keys in int8": lambda: attend(int8(q)[picked], int8(k), v8, rounded=True),
    }
    return {name: relative(call(), exact) for name, call in tried.items()}


def main() -> None:
    draws = int(sys.argv[1]) if len(sys.argv) > 1 else 8
    for K in (128, 64):
        found = [draw(K, seed) for seed in range(draws)]
        print(f"heads of {K}, {draws} draws{'median':>30}{'mean':>8}{'worst':>8}")
        for name in found[0]:
            errors = [of_draw[name] for of_draw in found]
            told = (statistics.median(errors), statistics.mean(errors), max(errors))
            print(f"  {name:40}" + "".join(f"{error:8.4f}" for error in told))


if __name__ == "__main__":
    main()
