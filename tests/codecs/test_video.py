"""Decoding video: the default plan equals stock diffusers, other plans are close to it, failures are named."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from diffusers.video_processor import VideoProcessor

from diptych.codecs import video
from diptych.codecs.tiles import GIB, plan_tiles, whole_plan
from diptych.codecs.video import decode_cost, decode_video
from diptych.errors import ClipError


def latents(B, T, Y, X, seed=0):
    """Smooth latents of unit size, as a picture has: seams would show."""
    noise = torch.randn((B, 16, T, Y // 2, X // 2), generator=torch.Generator().manual_seed(seed))
    return torch.nn.functional.interpolate(noise, size=(T, Y, X), mode="trilinear")


@torch.no_grad()
def stock_pixels(vae, latents_BCTYX):
    return vae.decode(latents_BCTYX.to(vae.dtype) / vae.config.scaling_factor, return_dict=False)[0]


def stock_frames(vae, latents_BCTYX):
    clips = VideoProcessor(vae_scale_factor=8).postprocess_video(stock_pixels(vae, latents_BCTYX), output_type="np")
    return (clips * 255).round().astype(np.uint8)


@pytest.mark.parametrize("T", [1, 3, 4, 5, 6, 7, 10])
def test_the_default_plan_decodes_what_stock_decodes(pipeline, T):
    z = latents(1, T, 6, 4, seed=T)
    frames = decode_video(pipeline.vae, z, plan_tiles(T, 6, 4))
    want = stock_frames(pipeline.vae, z)
    assert frames.shape == want.shape == (1, 4 * (T - 1) + 1, 48, 32, 3)
    assert want.std() > 10
    difference = np.abs(frames.astype(int) - want)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 1e-3, "only where rounding is a toss-up"


def test_a_batch_is_decoded_clip_by_clip_to_the_same_frames(pipeline):
    z = latents(2, 5, 4, 4)
    plan = plan_tiles(5, 4, 4)
    both = decode_video(pipeline.vae, z, plan)
    for clip, one in zip(both, z, strict=True):
        assert np.array_equal(clip, decode_video(pipeline.vae, one[None], plan)[0])
    assert not np.array_equal(both[0], both[1])


def test_a_vae_in_bfloat16_is_blended_in_float32(pipeline):
    z = latents(1, 6, 4, 4)
    single = decode_video(pipeline.vae, z, plan_tiles(6, 4, 4)).astype(int)
    half = decode_video(pipeline.vae.to(torch.bfloat16), z, plan_tiles(6, 4, 4)).astype(int)
    stock = stock_frames(pipeline.vae, z).astype(int)
    pipeline.vae.to(torch.float32)
    assert 0 < np.abs(half - single).mean() < 2
    assert np.abs(half - single).mean() <= np.abs(stock - single).mean()


def test_tiles_in_space_come_close_to_the_untiled_picture(pipeline):
    z = latents(1, 1, 24, 40)
    plain = plan_tiles(1, 24, 40)
    cost = decode_cost(pipeline.vae)
    budget = int(cost.peak(1, 20, 24, 192, 320))
    tiled = plan_tiles(1, 24, 40, budget, cost)
    assert len(tiled.tiles) > len(plain.tiles)
    difference = np.abs(
        decode_video(pipeline.vae, z, tiled).astype(int) - decode_video(pipeline.vae, z, plain).astype(int)
    )
    # Group norm takes its statistics per tile, so tiles differ a little everywhere; a seam would stand out.
    assert 0 < difference.mean() < 12
    columns = np.abs(np.diff(difference.mean(axis=(0, 1, 2, 4))))
    assert columns.max() < 6


def test_the_whole_plan_is_the_vae_without_windows(pipeline):
    z = latents(1, 6, 4, 4)
    pipeline.vae.use_framewise_decoding = False
    want = stock_frames(pipeline.vae, z)
    pipeline.vae.use_framewise_decoding = True
    difference = np.abs(decode_video(pipeline.vae, z, whole_plan(6, 4, 4)).astype(int) - want)
    assert difference.max() <= 1
    assert not np.array_equal(want, decode_video(pipeline.vae, z, plan_tiles(6, 4, 4)))


def test_every_tile_is_told(pipeline):
    told = []
    decode_video(pipeline.vae, latents(2, 7, 2, 2), plan_tiles(7, 2, 2), on_tile=lambda *done: told.append(done))
    assert told == [(1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.fixture
def log(monkeypatch):
    """What happens in which order: tiles as they are started, and what the callbacks note."""
    events, plain = [], video.decode_tile

    def decode_tile(vae, latents_CTYX, tile):
        events.append(f"decode from {tile.t.low}")
        return plain(vae, latents_CTYX, tile)

    monkeypatch.setattr(video, "decode_tile", decode_tile)
    return events


def noting(log):
    return {
        "on_tile": lambda done, of: log.append(f"tile {done} of {of}"),
        "meanwhile": lambda: log.append("sound"),
        "on_frames": lambda clip, frames: log.append(f"{len(frames)} frames"),
    }


def test_frames_come_to_the_host_while_the_next_window_is_decoded(pipeline, log):
    decode_video(pipeline.vae, latents(1, 10, 2, 2), plan_tiles(10, 2, 2), **noting(log))
    first, second, third = ["decode from 0", "sound"], ["decode from 13"], ["decode from 25"]
    assert log == [
        *first,
        *second,
        "13 frames",
        "tile 1 of 3",
        *third,
        "12 frames",
        "tile 2 of 3",
        "12 frames",
        "tile 3 of 3",
    ]


def test_what_wants_to_be_over_before_the_first_tile_is(pipeline, log):
    decode_video(pipeline.vae, latents(1, 1, 2, 2), plan_tiles(1, 2, 2), **noting(log), at_once=True)
    assert log == ["sound", "decode from 0", "1 frames", "tile 1 of 1"]


def test_frames_are_told_in_order_and_each_once(pipeline):
    cost = decode_cost(pipeline.vae)
    budget = int(cost.peak(5, 2, 16, 16, 192)) + 1
    for B, X, plan, tiles in ((2, 2, plan_tiles(6, 2, 2), 2), (1, 24, plan_tiles(6, 2, 24, budget, cost), 4)):
        told = [[] for _ in range(B)]
        frames = decode_video(
            pipeline.vae,
            latents(B, 6, 2, X),
            plan,
            on_frames=lambda clip, part, told=told: told[clip].append(part.copy()),
        )
        assert len(plan.tiles) == tiles
        assert [[len(part) for part in clip] for clip in told] == [[13, 8]] * B
        assert np.array_equal(np.stack([np.concatenate(clip) for clip in told]), frames)


def test_a_tile_is_let_go_before_the_next_is_decoded(pipeline, monkeypatch):
    alive, plain = [0], video.decode_tile

    def counted(*given):
        assert alive == [0]
        pixels = plain(*given).half()  # as on a GPU: blending works on a copy in float32
        alive[0] += 1
        weakref.finalize(pixels, lambda: alive.__setitem__(0, alive[0] - 1))
        return pixels

    monkeypatch.setattr(video, "decode_tile", counted)
    decode_video(pipeline.vae, latents(1, 10, 2, 2), plan_tiles(10, 2, 2))


def test_frames_that_are_not_finite_are_not_told(pipeline):
    z, told = latents(1, 10, 2, 2), []
    z[:, :, 6] = float("nan")
    with pytest.raises(ClipError, match="frames 13 to 24 are not finite"):
        decode_video(pipeline.vae, z, plan_tiles(10, 2, 2), on_frames=lambda _, frames: told.append(len(frames)))
    assert told == [13]


def test_pixels_that_are_not_finite_are_an_error_that_names_the_frames(pipeline):
    z = latents(1, 7, 2, 2)
    z[:, :, 6] = float("nan")
    with pytest.raises(ClipError, match="frames 13 to 24 are not finite"):
        decode_video(pipeline.vae, z, plan_tiles(7, 2, 2))


def test_the_cost_follows_the_widths_and_the_dtype(pipeline):
    class Released:
        dtype = torch.float16
        config = type("Config", (), {"block_out_channels": (128, 256, 512, 512)})

    assert decode_cost(Released).peak(5, 60, 108, 480, 864) / GIB == pytest.approx(23.5, abs=0.01)
    assert decode_cost(pipeline.vae).per_pixel == pytest.approx(decode_cost(Released).per_pixel * 24 / 384 * 2)
