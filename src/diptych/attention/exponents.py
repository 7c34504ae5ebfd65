"""Scores as exponents of two, and how large they can get.

softmax(q k / sqrt(K)) is 2^s over its sum, with s = q' k and q' = q * log2(e) / sqrt(K): whoever makes the queries can
multiply them by that factor before they are rounded, and no kernel has to multiply a score again.

Where queries and keys are RMS-normalised, scores are bounded before anything is computed. With channels in pairs p (a
rotation turns pairs), |q_p| <= w_p |x_p| and |k_p| <= u_p |y_p| for unit-variance x and y, so by Cauchy and Schwarz
q k <= max_p(w_p u_p) * K. A kernel that knows the bound needs no maximum of a row to keep 2^s finite.
"""

from __future__ import annotations

import math

from torch import Tensor

LOG2_E = math.log2(math.e)

MOST = 90.0
"""Largest bound that float32 holds without a shift: 2^90 times a million keys times values up to 2^17 is finite, and
2^-90 is far from the smallest normal number. bfloat16 has the same exponents, so weights lose no precision either."""

ROUNDED = 1.02
"""Queries and keys are rounded after they were normalised: to bfloat16, by at most 2^-8 of their length each."""


def factor(head_dim: int) -> float:
    """What turns q k into an exponent of two: log2(e) / sqrt(K)."""
    return LOG2_E / math.sqrt(head_dim)


def bound(q_weight_K: Tensor, k_weight_K: Tensor) -> float:
    """Largest |s| of queries and keys normalised per head with these weights, rotated or not. Waits for the device."""
    K = len(q_weight_K)
    q_P, k_P = (x.detach().float().abs().cpu().unflatten(0, (-1, 2)).amax(1) for x in (q_weight_K, k_weight_K))
    return ROUNDED * float((q_P * k_P).max()) * K * factor(K)
