"""Pictures and sound of a batch of tracks, vectorised in torch on any device: what the world looks and sounds like."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from diptych.bench.toyworld import FPS, HEIGHT, WIDTH, shade
from diptych.request import AUDIO_RATE, SAMPLES_PER_AUDIO_LATENT, audio_latents
from tools.toyworld.tracks import Batch

HARMONICS = ((1.0, 1.0), (2.0, 0.35), (3.0, 0.15))
LOUDNESS = 0.25
HOP = 512
"""Samples of one mel frame."""
BEEP_FRAMES = 6
KNOCK_SECONDS = 0.06


def to_device(batch: Batch, device: torch.device | str) -> dict[str, Tensor]:
    return {f.name: torch.from_numpy(getattr(batch, f.name)).to(device) for f in fields(batch)}


def pictures(batch: dict[str, Tensor]) -> Tensor:
    """Frames (B, 3, F, HEIGHT, WIDTH), float32 in [-1, 1], edges antialiased over one pixel."""
    device = batch["x"].device
    light = torch.from_numpy(shade()).to(device)
    image = batch["background"][:, :, None, None, None] * light
    image = image.expand(-1, -1, batch["x"].shape[1], -1, -1)
    at = batch["other_at"]
    rest: dict[str, Any] = {
        "x": at[:, None, 0],
        "y": at[:, None, 1],
        "radius": batch["other_radius"][:, None],
        "angle": torch.zeros_like(at[:, :1]),
    }
    for shape, color, place in (
        (batch["other_shape"], batch["other_color"], rest),
        (batch["shape"], batch["color"], batch),
    ):
        cover = _cover(shape, place["x"], place["y"], place["radius"], place["angle"])[:, None]
        image = image + cover * (color[:, :, None, None, None] - image)
    return (image * 2 - 1).clamp(-1, 1)


def _cover(shape: Tensor, x: Tensor, y: Tensor, radius: Tensor, angle: Tensor) -> Tensor:
    """Share of each pixel that the shape covers, (B, F, HEIGHT, WIDTH)."""
    device = x.device
    px = torch.arange(WIDTH, device=device) + 0.5 - x[..., None, None]
    py = torch.arange(HEIGHT, device=device)[:, None] + 0.5 - y[..., None, None]
    cos, sin = torch.cos(angle)[..., None, None], torch.sin(angle)[..., None, None]
    px, py = px * cos + py * sin, py * cos - px * sin
    r = radius[..., None, None]
    kind = shape[:, None, None, None]
    distance = torch.where(
        kind < 2,
        torch.where(kind == 0, torch.hypot(px, py) - r, torch.maximum(px.abs(), py.abs()) - 0.88 * r),
        torch.where(kind == 2, _polygon(px, py, 1.36 * r, 3, 1.0), _polygon(px, py, 1.42 * r, 5, 0.5)),
    )
    return (0.5 - distance).clamp(0, 1) * (r > 0)


def _polygon(px: Tensor, py: Tensor, outer: Tensor, points: int, depth: float) -> Tensor:
    """Signed distance, near the edge, to a polygon with a tip upward.

    `depth` 1 makes it regular; below 1, `points` tips with notches between them at `depth` of the tip's radius.
    """
    sector = math.pi / points
    notch = math.cos(sector) if depth == 1.0 else depth
    turned = torch.remainder(torch.atan2(px, -py) + sector, 2 * sector) - sector
    length = torch.hypot(px, py)
    u, v = length * torch.cos(turned), (length * torch.sin(turned)).abs()
    # The edge runs from the tip (outer, 0) to the notch, half a sector away.
    nx, ny = notch * math.cos(sector), notch * math.sin(sector)
    ex, ey = nx - 1.0, ny
    norm = math.hypot(ex, ey)
    return ((u - outer) * ey - v * ex) / norm


def sounds(batch: dict[str, Tensor], fps: float = FPS) -> Tensor:
    """Waveform (B, samples), float32: as many samples as the latents of that many frames stand for (44.1 kHz).

    Everything starts, stops and changes on the borders of mel frames, where every tone passes zero.
    """
    pitch = batch["pitch"]
    B, F = pitch.shape
    device = pitch.device
    samples = audio_latents(F, fps) * SAMPLES_PER_AUDIO_LATENT
    hops = samples // HOP
    hop = torch.arange(hops, device=device)
    frame = (hop * HOP / AUDIO_RATE * fps).clamp(max=F - 1)
    low = frame.floor().long().clamp(max=max(F - 2, 0))
    part = frame - low
    steps = torch.round(pitch[:, low] * (1 - part) + pitch[:, (low + 1).clamp(max=F - 1)] * part)
    inside = torch.arange(HOP, device=device) / HOP
    cycles = steps[:, :, None] * inside
    tone = sum(a * torch.sin(2 * math.pi * k * cycles) for k, a in HARMONICS)
    assert isinstance(tone, Tensor)
    tone = tone.flatten(1)

    seconds = torch.arange(samples, device=device) / AUDIO_RATE
    attack = (seconds / 0.03).clamp(max=1)
    hops_a_frame = AUDIO_RATE / fps / HOP
    begin = [round(beep * BEEP_FRAMES * hops_a_frame) for beep in range(int(F / BEEP_FRAMES) + 2)]
    last = max(i for i, b in enumerate(begin) if b < hops)
    begins = torch.tensor(begin[: last + 1], device=device)
    since = hop - begins[torch.searchsorted(begins, hop, right=True) - 1]
    beep_seconds = (since[:, None] * HOP + torch.arange(HOP, device=device)).flatten() / AUDIO_RATE
    beep_length = round(BEEP_FRAMES / 2 * hops_a_frame) * HOP / AUDIO_RATE
    gate = (torch.minimum(beep_seconds, beep_length - beep_seconds) / 0.01).clamp(0, 1)
    kind = batch["sound"][:, None]
    level = torch.where(kind == 0, attack, torch.where(kind == 1, gate, 0.0))
    knock = torch.zeros(B, samples, device=device)
    click = torch.zeros_like(knock)
    for contact in batch["contacts"].unbind(1):
        onset = torch.round(contact * hops_a_frame) * (HOP / AUDIO_RATE)
        after = seconds - onset[:, None]
        on = (after >= 0) & (contact[:, None] >= 0)
        after = after.clamp(min=0)
        knock = knock + torch.where(on, torch.exp(-after / KNOCK_SECONDS) * (after / 0.002).clamp(max=1), 0.0)
        # A click of fixed shape: a fast falling chirp, the same at every contact.
        sweep = torch.sin(2 * math.pi * 60.0 * torch.log1p(after * 200.0))
        click = click + torch.where(on, sweep * torch.exp(-after / 0.004), 0.0)
    knocking = kind == 2
    level = torch.where(knocking, 1.6 * knock, level)
    return LOUDNESS * (level * tone + torch.where(knocking, 1.2 * click, 0.0))
