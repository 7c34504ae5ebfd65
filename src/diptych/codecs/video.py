"""Video latents to frames, tile by tile. Decoding and blending are apart, so that tiles can be dealt to ranks."""

from __future__ import annotations

from collections.abc import Callable
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


def decode_video(
    vae: Any,
    latents_BCTYX: Tensor,
    plan: TilePlan,
    on_tile: OnTile | None = None,
    deal: Deal | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> npt.NDArray[np.uint8]:
    """Frames (B, F, H, W, 3), uint8, of finished latents (B, C, T, Y, X) as diffusers' `output_type="latent"` has them.

    vae: diffusers' `AutoencoderKLHunyuanVideo`; it runs in its own dtype and on its own device, one tile at a time.
    Blending, the step to 0..255 and rounding (half to even, as diffusers does) run in float32.
    deal: shares the tiles with other ranks, which call `lend_decoder` with the same latents, plan and kind of VAE; who
    decodes a tile changes no bit of the frames. meanwhile: what this rank does first, while the others decode.
    Raises `ClipError` when a decoded picture is not finite.
    """
    tiles = _Tiles(vae, latents_BCTYX, plan)
    clips, done = [], 0
    with (deal or Deal()).results(tiles.count, tiles.decode, tiles.empty) as decoded:
        if meanwhile is not None:
            meanwhile()
        for _ in latents_BCTYX:
            canvas = Canvas(plan)
            for tile in plan.tiles:
                canvas.add(tile, next(decoded).float())
                done += 1
                if on_tile is not None:
                    on_tile(done, tiles.count)
            clips.append(canvas.frames)
    return np.stack(clips)


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


class Canvas:
    """Blends the tiles of one clip. At any time it holds one window of float32 pixels; what is finished is uint8.

    `frames` (F, H, W, 3) is complete after the last tile of the plan. Tiles must come in the order of the plan:
    then the sums round alike, whoever decoded the tiles.
    """

    def __init__(self, plan: TilePlan) -> None:
        self.plan = plan
        self.frames = np.empty((plan.frames, plan.height, plan.width, 3), dtype=np.uint8)
        self._next = 0
        self._window: Tensor | None = None
        self._carried: Tensor | None = None

    def add(self, tile: Tile, pixels_CTHW: Tensor) -> None:
        """Blend one tile in, changing `pixels_CTHW`; after the last tile of a window its finished frames are written.

        Raises `ClipError` when they are not finite.
        """
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
            self._close(tile, self._window)

    def _open(self, tile: Tile, like: Tensor) -> Tensor:
        window = like.new_zeros((3, tile.t.high - tile.t.low, self.plan.height, self.plan.width))
        if self._carried is not None:
            window[:, : tile.t.rise] = self._carried
        return window

    def _close(self, tile: Tile, window: Tensor) -> None:
        finished = window.shape[1] - tile.t.fall
        low = tile.t.low
        self.frames[low : low + finished] = _to_uint8(window[:, :finished], low)
        self._carried = window[:, finished:].clone()
        self._window = None


def _ramp(length: int, axis: int, like: Tensor) -> Tensor:
    shape = [1] * like.ndim
    shape[axis] = length
    return (torch.arange(length, device=like.device, dtype=torch.float32) / length).view(shape)


def _to_uint8(pixels_CTHW: Tensor, first_frame: int) -> npt.NDArray[np.uint8]:
    if not bool(torch.isfinite(pixels_CTHW).all()):
        last = first_frame + pixels_CTHW.shape[1] - 1
        raise ClipError(f"frames {first_frame} to {last} are not finite: the video VAE gave NaN or infinite pixels.")
    levels = (pixels_CTHW * 0.5 + 0.5).clamp(0, 1).mul(255).round().to(torch.uint8)
    frames: npt.NDArray[np.uint8] = levels.permute(1, 2, 3, 0).contiguous().cpu().numpy()
    return frames
