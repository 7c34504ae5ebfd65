"""Rotary tables, made from positions once a request; never buffers, so no dtype move or offload can spoil them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from diptych.model.ops import Rope


def frequencies(pairs: int, device: torch.device) -> Tensor:
    """10000^(-i / pairs), float32 (pairs,)."""
    steps = torch.arange(pairs, dtype=torch.float32, device=device)
    return torch.exp(-math.log(10_000.0) * steps / pairs)


def rope_1d(length: int, head_dim: int, device: torch.device, scaling: float = 1.0) -> Rope:
    """Table for positions 0..length-1; `scaling` multiplies the frequencies (0.144 for audio)."""
    freqs = frequencies(head_dim // 2, device) * scaling
    angles = torch.outer(torch.arange(length, dtype=torch.float32, device=device), freqs)
    return Rope(torch.cos(angles), torch.sin(angles))


def rope_3d(
    T: int,
    rows: int,
    columns: int,
    *,
    tail: bool,
    axes_dims: tuple[int, int, int],
    scale_factor: tuple[float, float, float],
    device: torch.device,
) -> Rope:
    """Table of the flattened (T, rows, columns) token grid.

    Angles are divided by `scale_factor`, each axis owns `axes_dims[axis] / 2` pairs, in the order time, row, column.
    With `tail` one more frame follows that sits at time 0: the reference image.
    """
    time = torch.arange(T, dtype=torch.float32, device=device)
    if tail:
        time = torch.cat([time, time.new_zeros(1)])
    axes = (
        time,
        torch.arange(rows, dtype=torch.float32, device=device),
        torch.arange(columns, dtype=torch.float32, device=device),
    )
    angles = [
        torch.outer(position, frequencies(width // 2, device)) / scale
        for position, width, scale in zip(axes, axes_dims, scale_factor, strict=True)
    ]
    grid = (len(time), rows, columns)
    flat = torch.cat(
        [
            angles[0][:, None, None].expand(*grid, -1),
            angles[1][None, :, None].expand(*grid, -1),
            angles[2][None, None, :].expand(*grid, -1),
        ],
        dim=-1,
    ).flatten(0, 2)
    return Rope(torch.cos(flat), torch.sin(flat))
