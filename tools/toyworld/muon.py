"""Muon: momentum whose direction is made orthogonal, for the matrices of the blocks (Jordan et al. 2024).

The step is scaled to the size that Adam's would have (Liu et al. 2025, "Muon is scalable for LLM training"), so both
share one learning rate. Matrices of one shape are worked on together: a step is a handful of batched products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_A, _B, _C = 3.4445, -4.7750, 2.0315
"""Coefficients of the quintic Newton-Schulz iteration."""


def orthogonal(batch: Tensor, rounds: int = 5) -> Tensor:
    """The nearest matrices with singular values of about one, of a batch (N, rows, columns)."""
    tall = batch.shape[1] > batch.shape[2]
    x = (batch.mT if tall else batch).bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(rounds):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    return x.mT if tall else x


class Muon(torch.optim.Optimizer):
    """groups: matrices of one shape each, of which all or none have a gradient in a step.

    `lr` is a tensor, so that a captured step reads the rate of its moment; `share` multiplies it.
    """

    def __init__(self, groups: Sequence[Sequence[Tensor]], momentum: float = 0.95, share: float = 1.0) -> None:
        live = [p for group in groups for p in group]
        super().__init__(live, {"lr": torch.zeros((), device=live[0].device), "share": share})
        self._momentum = momentum
        self._groups = [(list(group), torch.zeros_like(torch.stack(list(group)))) for group in groups]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        rate: Tensor = self.param_groups[0]["lr"]
        for group, moment in self._groups:
            grads = [p.grad for p in group if p.grad is not None]
            if not grads:  # a batch without sound leaves the sound's side where it is
                continue
            assert len(grads) == len(group)
            fresh = torch.stack(grads)
            moment.lerp_(fresh, 1 - self._momentum)
            ahead = fresh.lerp(moment, self._momentum)
            size = 0.2 * max(fresh.shape[1:]) ** 0.5
            change = orthogonal(ahead).float() * (rate * size)
            torch._foreach_sub_(group, list(change.unbind(0)))
