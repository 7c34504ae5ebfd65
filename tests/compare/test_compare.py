"""`diptych compare`: figures that can be checked by hand, limits, and the picture."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from diptych.bench.compare import compare, pairs
from diptych.bench.compare_sheet import comparison_sheet
from diptych.bench.compare_sound import FFT, log_mel_distance, mel_filters, si_sdr
from diptych.cli.main import app
from diptych.errors import MediaError
from diptych.media.clip import Clip

RATE = 44_100


def clip(change=0, frames=6, sound=True, level=1.0) -> Clip:
    """A smooth picture that moves, and a tone; `change` is added to the blue of frame 3."""
    t, y, x = np.mgrid[0:frames, 0:32, 0:48]
    picture = np.stack([60 + x + 4 * t, 80 + y, 100 + (x + y) // 2], -1).astype(np.uint8)
    if frames > 3:
        picture[3, ..., 2] += change
    tone = (level * 0.3 * np.sin(2 * np.pi * 440 * np.arange(RATE // 4) / RATE)).astype(np.float32)
    return Clip(picture, tone if sound else None, 24.0)


def noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=RATE).astype(np.float32) * 0.1


def test_a_clip_is_as_good_as_itself():
    result = compare(clip(), clip())
    assert np.isinf(result.psnr).all()
    assert result.figures["worst_ssim"] == pytest.approx(1.0)
    assert (result.temporal, result.log_mel, result.si_sdr) == (0.0, 0.0, math.inf)
    told = result.to_dict()
    assert told["identical"] and told["worst_psnr"] is None
    json.dumps(told, allow_nan=False)


def test_psnr_is_of_each_frame_and_the_worst_is_told():
    result = compare(clip(), clip(change=6))
    assert result.worst == 3
    assert result.psnr[3] == pytest.approx(10 * math.log10(255**2 / (6**2 / 3)))
    assert np.isinf(np.delete(result.psnr, 3)).all()
    assert result.temporal == pytest.approx(2 * (6 / 3) / 5), "two of five changes differ by 6 in one colour of three"


def test_ssim_is_that_of_its_authors():
    """A constant added to a frame leaves only the term of the means, which can be written down."""
    flat = np.full((1, 32, 48, 3), 100, np.uint8)
    result = compare(Clip(flat, None, 24.0), Clip(flat + np.uint8(20), None, 24.0))
    c1 = (0.01 * 255) ** 2
    assert result.ssim[0] == pytest.approx((2 * 100 * 120 + c1) / (100**2 + 120**2 + c1), rel=1e-9)
    a, b = (np.random.default_rng(n).integers(0, 256, (1, 32, 48, 3), dtype=np.uint8) for n in (0, 1))
    assert abs(compare(Clip(a, None, 24.0), Clip(b, None, 24.0)).ssim[0]) < 0.1, "two noises are not alike"


def test_si_sdr_ignores_level_and_tells_noise():
    tone, other = noise(0), noise(1)
    assert si_sdr(tone, 0.25 * tone) > 90
    assert si_sdr(tone, tone + 0.1 * other) == pytest.approx(20, abs=0.3)
    assert si_sdr(tone, other) < -20


def test_log_mel_tells_decibels():
    tone = noise(0)
    assert log_mel_distance(tone, tone * 0.5, RATE) == pytest.approx(20 * math.log10(2), abs=1e-3)
    assert log_mel_distance(tone, tone[::-1].copy(), RATE) > 0.5, "the same power at other times is another sound"


def test_mel_bands_lie_where_they_should():
    filters = mel_filters(RATE)
    assert np.allclose(filters.sum(axis=1), 1)
    middles = (filters * np.linspace(0, RATE / 2, FFT // 2 + 1)).sum(axis=1)
    mel = 2595 * np.log10(1 + middles / 700)
    assert np.abs(np.diff(mel[20:]) - np.diff(mel[20:]).mean()).max() < 3
    assert (np.diff(middles) > 0).all()


def test_lengths_may_differ_and_are_told():
    result = compare(clip(), clip(frames=4))
    assert len(result.psnr) == 4
    assert result.figures["duration"] == pytest.approx(2 / 24)


def test_what_cannot_be_compared_is_refused():
    small = Clip(clip().frames[:, :16], None, 24.0)
    with pytest.raises(MediaError, match="48x32 and 48x16"):
        compare(clip(), small)
    with pytest.raises(MediaError, match="cannot hold log_mel to 1: a clip has no sound"):
        compare(clip(), clip(sound=False)).beyond({"log_mel": 1.0})


def test_limits_name_what_is_beyond():
    result = compare(clip(), clip(change=60))
    assert result.beyond({"worst_psnr": 10.0, "temporal": 200.0}) == []
    (sentence,) = result.beyond({"worst_psnr": 40.0, "log_mel": 0.1})
    assert sentence.startswith("worst_psnr is 17.3")


def test_folders_are_compared_name_by_name(tmp_path):
    for folder, names in (("a", "12"), ("b", "21"), ("c", "1")):
        (tmp_path / folder).mkdir()
        for name in names:
            (tmp_path / folder / f"{name}.mp4").touch()
    assert [(a.name, b.name) for a, b in pairs(tmp_path / "a", tmp_path / "b")] == [("1.mp4",) * 2, ("2.mp4",) * 2]
    with pytest.raises(MediaError, match=r"2\.mp4 is in one of them only"):
        pairs(tmp_path / "a", tmp_path / "c")
    with pytest.raises(MediaError, match="two files or two folders"):
        pairs(tmp_path / "a", tmp_path / "b" / "1.mp4")


def test_the_picture_marks_the_worst_frame_and_shows_only_what_differs():
    one, other = clip(), clip(change=90)
    result = compare(one, other)
    sheet = np.asarray(comparison_sheet(one, other, result, ("one", "other")))
    amber = (np.abs(sheet[..., :3].astype(int) - (245, 166, 91)).max(-1) < 8).sum()
    same = np.asarray(comparison_sheet(one, one, compare(one, one), ("one", "one")))
    assert amber > 500
    assert (np.abs(same[..., :3].astype(int) - (245, 166, 91)).max(-1) < 8).sum() < amber / 10
    assert sheet.shape[1] == 1600


def test_the_command(tmp_path):
    for name, change in (("a", 0), ("b", 60)):
        (tmp_path / name).mkdir()
        clip(change).save(tmp_path / name / "x.mp4")
    a, b = str(tmp_path / "a"), str(tmp_path / "b")
    done = CliRunner().invoke(app, ["compare", a, b, "--json", "--sheet", str(tmp_path / "sheets"), "--min-psnr", "10"])
    assert done.exit_code == 0, done.output
    assert 15 < json.loads(done.output)["clips"]["x.mp4"]["worst_psnr"] < 25
    assert (tmp_path / "sheets" / "x.png").stat().st_size > 10_000
    done = CliRunner().invoke(app, ["compare", f"{a}/x.mp4", f"{b}/x.mp4", "--min-psnr", "40"])
    assert done.exit_code == 1
    assert "worst_psnr is" in done.output
