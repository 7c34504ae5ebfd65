"""Video latents to frames, tile by tile. Decoding and blending are apart, so that tiles can be dealt to ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diptych.codecs.float32 import full_float32
from diptych.codecs.tiles import Tile, TileCost, TilePlan, released_cost
from diptych.codecs.vae_fast import FastDecoder
from diptych.errors import ClipError
from diptych.parallel.deal import Deal

OnTile = Callable[[int, int], None]
"""Called after each tile with (done, of)."""
OnFrames = Callable[[int, npt.NDArray[np.uint8]], None]
"""Called with the number of a clip and its next frames (N, H, W, 3) once they are final: in order, each frame once.

They are part of the clip, so they are not to be changed, and what takes long with them belongs on another thread.
"""


def decode_video(
    vae: Any,
    latents_BCTYX: Tensor,
    plan: TilePlan,
    on_tile: OnTile | None = None,
    deal: Deal | None = None,
    meanwhile: Callable[[], None] | None = None,
    *,
    at_once: bool = False,
    on_frames: OnFrames | None = None,
) -> npt.NDArray[np.uint8]:
    """Frames (B, F, H, W, 3), uint8, of finished latents (B, C, T, Y, X) as diffusers' `output_type="latent"` has them.

    vae: diffusers' `AutoencoderKLHunyuanVideo`; it runs in its own dtype and on its own device, one tile at a time.
    Blending, the step to 0..255 and rounding (half to even, as diffusers does) run in float32. A GPU is always one tile
    ahead: while it decodes, the frames that the tile before finished are copied to the host and told to `on_frames`.
    deal: shares the tiles with other ranks, which call `lend_decoder` with the same latents, plan and kind of VAE; who
    decodes a tile changes no bit of the frames. meanwhile: what this rank does besides, once the first tile is started;
    `at_once`: before that, while only the others decode.
    Raises `ClipError` when a decoded picture is not finite.
    """
    tiles, count = _Tiles(vae, latents_BCTYX, plan), len(plan.tiles)
    frames = np.empty((len(latents_BCTYX), plan.frames, plan.height, plan.width, 3), dtype=np.uint8)
    host = _Host(frames, vae.device, on_frames)
    with (deal or Deal()).results(tiles.count, tiles.decode, tiles.empty) as decoded:
        if meanwhile is not None and at_once:
            meanwhile()
        for number in range(tiles.count):
            started = next(decoded)
            if meanwhile is not None and number == 0 and not at_once:
                meanwhile()
            host.take()
            if on_tile is not None and number:
                on_tile(number, tiles.count)
            clip, index = divmod(number, count)
            if index == 0:
                canvas = Canvas(plan)
            host.expect(clip, canvas.add(plan.tiles[index], started.float()))
            del started  # not to be held while the next tile is decoded
        host.take()
        if on_tile is not None:
            on_tile(tiles.count, tiles.count)
    return frames


def lend_decoder(vae: Any, latents_BCTYX: Tensor, plan: TilePlan, deal: Deal) -> None:
    """Decode this rank's tiles for the first rank, which calls `decode_video` with the same `deal`."""
    tiles = _Tiles(vae, latents_BCTYX, plan)
    deal.lend(tiles.count, tiles.decode)


class _Tiles:
    """All tiles of a batch of clips, numbered clip by clip in the order of the plan."""

    def __init__(self, vae: Any, latents_BCTYX: Tensor, plan: TilePlan) -> None:
        assert latents_BCTYX.shape[2:] == (plan.T, plan.Y, plan.X), "the plan is for other latents"
        self.vae, self.latents, self.plan = vae, latents_BCTYX, plan
        self.count = len(latents_BCTYX) * len(plan.tiles)

    def decode(self, number: int) -> Tensor:
        clip, tile = divmod(number, len(self.plan.tiles))
        return decode_tile(self.vae, self.latents[clip], self.plan.tiles[tile])

    def empty(self, number: int) -> Tensor:
        tile = self.plan.tiles[number % len(self.plan.tiles)]
        shape = (3, *(span.high - span.low for span in (tile.t, tile.y, tile.x)))
        return torch.empty(shape, dtype=self.vae.dtype, device=self.vae.device)


@torch.no_grad()
def decode_tile(vae: Any, latents_CTYX: Tensor, tile: Tile) -> Tensor:
    """Pixels (3, frames, rows, columns) of one tile, in about -1..1, less the frame that a later window drops."""
    t, y, x = tile.t, tile.y, tile.x
    part = latents_CTYX[None, :, t.first : t.last, y.first : y.last, x.first : x.last]
    part = part.to(device=vae.device, dtype=vae.dtype) / vae.config.scaling_factor
    with full_float32(vae.dtype):
        pixels: Tensor = vae.decoder(vae.post_quant_conv(part))
    return pixels[0, :, t.drop :]


def decode_cost(vae: Any) -> TileCost:
    """What a tile of this VAE costs, by its decoder, the widths of its last two stages and its dtype."""
    if isinstance(getattr(vae, "decoder", None), FastDecoder):
        cost: TileCost = vae.decoder.cost
        return cost
    last, before = vae.config.block_out_channels[:2]
    itemsize = torch.empty((), dtype=vae.dtype).element_size()
    return released_cost(scale=(last + before) / 384, itemsize=itemsize)


@dataclass(frozen=True)
class Finished:
    """Frames from number `low` on that no later tile changes: uint8, where they were decoded, and whether every pixel
    was finite, as a tensor too, so that nothing waits for the device.
    """

    low: int
    frames_FHWC: Tensor
    finite: Tensor


class Canvas:
    """Blends the tiles of one clip. At any time it holds one window of float32 pixels.

    Tiles must come in the order of the plan: then the sums round alike, whoever decoded the tiles.
    """

    def __init__(self, plan: TilePlan) -> None:
        self.plan = plan
        self._next = 0
        self._window: Tensor | None = None
        self._carried: Tensor | None = None

    def add(self, tile: Tile, pixels_CTHW: Tensor) -> Finished | None:
        """Blend one tile in, changing `pixels_CTHW`; the last tile of a window returns the frames that it finished."""
        assert tile == self.plan.tiles[self._next], "tiles come in the order of the plan"
        spans = (tile.t, tile.y, tile.x)
        assert pixels_CTHW.shape == (3, *(span.high - span.low for span in spans))
        self._next += 1
        for axis, span in enumerate(spans, start=1):
            if span.rise:
                pixels_CTHW.narrow(axis, 0, span.rise).mul_(_ramp(span.rise, axis, pixels_CTHW))
            if span.fall:
                start = span.high - span.low - span.fall
                pixels_CTHW.narrow(axis, start, span.fall).mul_(1 - _ramp(span.fall, axis, pixels_CTHW))
        if self._window is None:
            self._window = self._open(tile, pixels_CTHW)
        self._window[:, :, tile.y.low : tile.y.high, tile.x.low : tile.x.high] += pixels_CTHW
        if self._next == len(self.plan.tiles) or self.plan.tiles[self._next].t != tile.t:
            return self._close(tile, self._window)
        return None

    def _open(self, tile: Tile, like: Tensor) -> Tensor:
        window = like.new_zeros((3, tile.t.high - tile.t.low, self.plan.height, self.plan.width))
        if self._carried is not None:
            window[:, : tile.t.rise] = self._carried
            self._carried = None
        return window

    def _close(self, tile: Tile, window: Tensor) -> Finished:
        finished = window.shape[1] - tile.t.fall
        self._carried, self._window = window[:, finished:].clone(), None
        pixels_CTHW = window[:, :finished]
        return Finished(tile.t.low, _to_uint8(pixels_CTHW), torch.isfinite(pixels_CTHW).all())


class _Host:
    """Takes finished frames into `frames` (B, F, H, W, 3) in host memory, one window behind the device.

    The copy runs on a stream of its own, so it waits only for the tiles that made these frames.
    """

    def __init__(self, frames: npt.NDArray[np.uint8], device: torch.device, on_frames: OnFrames | None) -> None:
        self._frames, self._on_frames = frames, on_frames
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._coming: tuple[int, Finished] | None = None

    def expect(self, clip: int, finished: Finished | None) -> None:
        """Note what `take` is to bring; it copies only what was started before this."""
        assert self._coming is None
        if finished is not None:
            self._coming = clip, finished
            if self._copies is not None:
                self._copies.wait_stream(torch.cuda.current_stream(self._copies.device))

    def take(self) -> None:
        """Bring what is expected, if anything, and tell it. Raises `ClipError` when it is not finite."""
        if self._coming is None:
            return
        (clip, finished), self._coming = self._coming, None
        first, last = finished.low, finished.low + len(finished.frames_FHWC) - 1
        here = self._frames[clip, first : last + 1]
        with nullcontext() if self._copies is None else torch.cuda.stream(self._copies):
            torch.from_numpy(here).copy_(finished.frames_FHWC)
            if not bool(finished.finite):
                raise ClipError(f"frames {first} to {last} are not finite: the video VAE gave NaN or infinite pixels.")
        if self._on_frames is not None:
            self._on_frames(clip, here)


def _ramp(length: int, axis: int, like: Tensor) -> Tensor:
    shape = [1] * like.ndim
    shape[axis] = length
    return (torch.arange(length, device=like.device, dtype=torch.float32) / length).view(shape)


def _to_uint8(pixels_CTHW: Tensor) -> Tensor:
    levels = (pixels_CTHW * 0.5 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
    return levels.permute(1, 2, 3, 0).contiguous()
