"""A clip at a glance: the right frames, in order, at the right size, with the sound under them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

from diptych.errors import MediaError
from diptych.media.clip import Clip
from diptych.media.sheets import SHEET_WIDTH, contact_sheet, save_png, sprite_sheet, thumbnail, waveform


@pytest.fixture
def numbered():
    """26 frames, each of one grey that tells its number."""
    greys = np.arange(26, dtype=np.uint8) * 9 + 20
    return Clip(np.broadcast_to(greys[:, None, None, None], (26, 48, 80, 3)).copy(), None, 25.0)


def shown(image, clip):
    """The distinct frames of `clip` that fill a good part of an image, in reading order."""
    levels = np.asarray(image.convert("RGB")).reshape(-1, 3)
    grey = levels[(levels[:, 0] == levels[:, 1]) & (levels[:, 1] == levels[:, 2]), 0]
    values, first, counts = np.unique(grey, return_index=True, return_counts=True)
    known = {int(level): number for number, level in enumerate(clip.frames[:, 0, 0, 0])}
    found = [(start, int(v)) for v, start, n in zip(values, first, counts, strict=True) if n > 2000]
    seen = sorted((start, known[level]) for start, level in found if level in known)
    return [number for _, number in seen]


def test_a_contact_sheet_shows_the_first_the_last_and_even_steps_between(numbered):
    assert shown(contact_sheet(numbered, 6), numbered) == [0, 5, 10, 15, 20, 25]
    assert shown(contact_sheet(replace(numbered, frames=numbered.frames[:2])), numbered) == [0, 1]


def test_a_contact_sheet_sits_on_any_page(clip):
    sheet = contact_sheet(clip)
    assert (sheet.mode, sheet.width) == ("RGBA", SHEET_WIDTH)
    alpha = np.asarray(sheet)[..., 3]
    assert alpha[0, 0] == alpha[-1, -1] == 0, "round corners let the page through"
    assert (alpha[40:-40] == 255).all()


def test_the_sound_is_drawn_under_the_frames_and_only_if_there_is_one(clip):
    clip = replace(clip, frames=np.full_like(clip.frames, 90))
    with_sound, without = contact_sheet(clip), contact_sheet(replace(clip, audio=None))
    assert with_sound.height > without.height + 100

    def blue(image):
        strip = np.asarray(image.convert("RGB"), dtype=int)[-150:-60]
        return (strip[..., 2] > strip[..., 0] + 40).any()

    assert blue(with_sound)
    assert not blue(without)


def test_the_title_is_the_prompt_on_at_most_two_lines(clip):
    plain = replace(clip, report={})
    heights = [contact_sheet(plain, title=title).height for title in ("", "a red ball", "long " * 40, "long " * 4000)]
    assert heights[0] < heights[1] < heights[2] == heights[3]
    prompted = replace(clip, report={"request": {"prompt": "a red ball"}})
    assert contact_sheet(prompted) == contact_sheet(plain, title="a red ball")
    assert contact_sheet(prompted, title="") == contact_sheet(plain)


def test_a_title_without_a_drawable_letter_or_a_space_still_fits(clip):
    plain = replace(clip, report={})
    assert contact_sheet(plain, title="球 球") == contact_sheet(plain), "no rows of empty boxes"
    assert contact_sheet(plain, title="x" * 5000).width == SHEET_WIDTH


@pytest.mark.parametrize(("width", "height"), [(16, 16), (64, 256), (512, 16)])
def test_every_shape_has_a_sheet(make_clip, width, height):
    if min(width, height) < 24:
        frames = np.random.default_rng(0).integers(0, 255, (5, height, width, 3), dtype=np.uint8)
        clip = Clip(frames, np.zeros(9188, np.float32), 24.0)
    else:
        clip = make_clip(frames=5, width=width, height=height)
    assert contact_sheet(clip).height < 4 * SHEET_WIDTH


def test_a_waveform_is_as_high_as_the_sound_is_loud():
    audio = np.zeros(44_100, dtype=np.float32)
    audio[22_050:] = 1.0
    alpha = np.asarray(waveform(audio, 600, 100))[..., 3]
    assert alpha.shape == (100, 600)
    quiet, loud = (np.flatnonzero(alpha[:, half].max(axis=1) > 128) for half in (slice(0, 290), slice(310, 600)))
    assert len(quiet) <= 4
    assert len(loud) >= 98
    half = np.flatnonzero(np.asarray(waveform(audio * 0.25, 600, 100))[..., 3].max(axis=1) > 128)
    assert len(half) == pytest.approx(100 * 0.25**0.6, abs=3)


def test_a_waveform_of_nothing_is_a_line_of_dots():
    assert np.asarray(waveform(np.zeros(0, dtype=np.float32), 60, 20))[..., 3].max() > 128


def test_a_thumbnail_keeps_the_shape(make_clip):
    clip = make_clip(frames=2, width=640, height=320)
    assert thumbnail(clip).size == (512, 256)
    assert thumbnail(clip, 100).size == (100, 50)
    small = make_clip(frames=2, width=96, height=64)
    assert np.array_equal(np.asarray(thumbnail(small)), small.frames[0])


def test_a_sprite_sheet_is_a_grid_without_gaps(numbered):
    sheet = sprite_sheet(numbered)
    assert sheet.size == (5 * 80, 5 * 48)
    tiles = np.asarray(sheet).reshape(5, 48, 5, 80, 3).transpose(0, 2, 1, 3, 4).reshape(25, -1)
    assert (tiles == tiles[:, :1]).all()
    order = [int(level) for level in tiles[:, 0]]
    assert order == sorted(order)
    assert (order[0], order[-1]) == (numbered.frames[0, 0, 0, 0], numbered.frames[-1, 0, 0, 0])
    few = sprite_sheet(replace(numbered, frames=numbered.frames[:3]), side=40)
    assert few.size == (3 * 40, 24)


def test_a_png_is_written_whole_or_not_at_all(clip, tmp_path):
    sheet = contact_sheet(clip)
    path = save_png(tmp_path / "sheet.png", sheet)
    assert np.array_equal(np.asarray(Image.open(path)), np.asarray(sheet))
    with pytest.raises(MediaError, match="no folder"):
        save_png(tmp_path / "none" / "sheet.png", sheet)


def test_the_seed_stands_under_the_title(clip, make_clip):
    told = contact_sheet(clip)
    silent = contact_sheet(
        make_clip(report={"request": {k: v for k, v in clip.report["request"].items() if k != "seed"}})
    )
    assert told.size == silent.size
    assert told.tobytes() != silent.tobytes()
