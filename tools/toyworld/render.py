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
    """Waveform (B, samples), float32: as many samples as the latents of that many frames stand for (44.1 kHz)."""
    pitch = batch["pitch"]
    B, F = pitch.shape
    device = pitch.device
    samples = audio_latents(F, fps) * SAMPLES_PER_AUDIO_LATENT
    seconds = torch.arange(samples, device=device, dtype=torch.float64) / AUDIO_RATE
    frame = (seconds * fps).clamp(max=F - 1)
    low = frame.floor().long().clamp(max=max(F - 2, 0))
    part = (frame - low).float()
    hertz = pitch[:, low] * (1 - part) + pitch[:, (low + 1).clamp(max=F - 1)] * part
    cycles = torch.cumsum(hertz.double() / AUDIO_RATE, dim=1)
    tone = sum(a * torch.sin(2 * math.pi * torch.remainder(k * cycles, 1.0)).float() for k, a in HARMONICS)
    assert isinstance(tone, Tensor)

    attack = (seconds / 0.03).clamp(max=1).float()
    in_beep = torch.remainder(seconds * fps, BEEP_FRAMES)
    gate = (torch.minimum(in_beep, BEEP_FRAMES / 2 - in_beep) / 0.24).clamp(0, 1).float()
    level = torch.zeros(B, samples, device=device)
    kind = batch["sound"][:, None]
    level = torch.where(kind == 0, attack, level)
    level = torch.where(kind == 1, gate, level)
    knock = torch.zeros_like(level)
    click = torch.zeros_like(level)
    for contact in batch["contacts"].unbind(1):
        since = (seconds - (contact[:, None] / fps).double()).float()
        on = (since >= 0) & (contact[:, None] >= 0)
        decay = torch.exp(-since.clamp(min=0) / KNOCK_SECONDS) * (since / 0.002).clamp(0, 1)
        knock = knock + torch.where(on, decay, 0.0)
        # A click of fixed shape: a fast falling chirp, the same at every contact.
        sweep = torch.sin(2 * math.pi * 60.0 * torch.log1p(since.clamp(min=0) * 200.0))
        click = click + torch.where(on, sweep * torch.exp(-since.clamp(min=0) / 0.004), 0.0)
    knocking = kind == 2
    level = torch.where(knocking, 1.6 * knock, level)
    return LOUDNESS * (level * tone + torch.where(knocking, 1.2 * click, 0.0))
