"""The endless source: clip number `index` of seed `seed` is always the same clip."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

import numpy as np
import torch
from torch import Tensor

from diptych.bench.toyworld import FRAMES, draw_scene
from diptych.bench.toyworld_captions import caption
from tools.toyworld.render import pictures, sounds, to_device
from tools.toyworld.tracks import Track, collate, draw_track


@dataclass(frozen=True)
class Drawn:
    """Captioned tracks, not yet rendered."""

    tracks: list[Track]
    captions: list[str]

    def render(self, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Pictures (B, 3, F, H, W) in [-1, 1] and waveforms (B, samples)."""
        batch = to_device(collate(self.tracks), device)
        return pictures(batch), sounds(batch)


def draw(
    seed: int, start: int, count: int, *, held_out: bool = False, frames: int = FRAMES, bouncing: float = 0.0
) -> Drawn:
    """Clips `start` .. `start + count` of the source `seed`. bouncing: share that is drawn until it bounces."""
    tracks, captions = [], []
    for index in range(start, start + count):
        rng = np.random.default_rng((seed, index))
        scene = draw_scene(rng, held_out=held_out)
        while index % 100 < 100 * bouncing and scene.motion != "bouncing":
            scene = draw_scene(rng, held_out=held_out)
        track = draw_track(scene, rng, frames)
        tracks.append(track)
        captions.append(caption(track.scene, rng, track.pace))
    return Drawn(tracks, captions)


class Pool:
    """A number of training clips drawn once, by all processors, kept as small arrays and rendered when asked for."""

    def __init__(self, seed: int, count: int, place: torch.device | str, bouncing: float = 0.0) -> None:
        # Forked before anything here touches the GPU.
        workers = min(os.cpu_count() or 1, 14)
        chunk = -(-count // (4 * workers))
        jobs = [(seed, start, min(chunk, count - start)) for start in range(0, count, chunk)]
        with get_context("fork").Pool(workers) as pool:
            parts = pool.starmap(partial(draw, bouncing=bouncing), jobs)
        self.captions = [caption for part in parts for caption in part.captions]
        self.track = to_device(collate([track for part in parts for track in part.tracks]), place)
        self.count = count

    def to(self, place: torch.device | str) -> None:
        self.track = {name: values.to(place) for name, values in self.track.items()}

    def take(self, chosen: Tensor) -> dict[str, Tensor]:
        return {name: values[chosen] for name, values in self.track.items()}

    def stream(self, size: int, seed: int) -> Iterator[dict[str, Tensor]]:
        """Batches of tracks without end, in a new order each time round."""
        generator = torch.Generator().manual_seed(seed)
        device = self.track["x"].device
        while True:
            order = torch.randperm(self.count, generator=generator).to(device)
            for start in range(0, self.count - size + 1, size):
                yield self.take(order[start : start + size])
