"""The analysers: right about what was rendered, and not fooled when a clip is broken on purpose."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from tools.toyworld.preview import as_clip
from tools.toyworld.render import pictures, sounds, to_device
from tools.toyworld.tracks import collate, draw_track

from diptych.bench.score import MEASURES, Score, bounce_share, judge, score
from diptych.bench.toyworld import Scene
from diptych.bench.toyworld_captions import score_prompts
from diptych.media.clip import Clip


@cache
def truth(scene: Scene, frames: int = 49) -> Clip:
    batch = to_device(collate([draw_track(scene, np.random.default_rng(2)).cut(frames)]), "cpu")
    return as_clip(pictures(batch)[0].numpy(), sounds(batch)[0].numpy())


BOUNCE = Scene("circle", "red", "blue", "bouncing", "knock")
RISE = Scene("square", "yellow", "gray", "up", "hum")
SLIDE = Scene("star", "white", "green", "left", "beep", ("circle", "orange", "right"))


def test_true_clips_score_full_marks() -> None:
    asked = [p for i, p in enumerate(score_prompts(40)) if i % 2 or p[0].motion == "bouncing"]
    known = {prompt: scene for scene, prompt in asked}
    told: list[int] = []
    result = score(
        lambda prompt, seed: truth(known[prompt]), prompts=asked, seeds=(0,), on_clip=lambda done, *_: told.append(done)
    )
    assert told == list(range(1, len(asked) + 1))
    for name in MEASURES:
        assert result.share(name) == 1.0, name
        assert result.count(name) > 0
    assert result.total == 1.0
    assert not result.missed
    assert "100.0 %" in result.table()
    assert result.to_dict()["measures"]["shape"] == {"share": 1.0, "clips": len(asked)}


@pytest.mark.parametrize("scene", [BOUNCE, RISE, SLIDE])
def test_a_clip_of_half_the_length_is_read_as_well(scene: Scene) -> None:
    assert judge(scene, truth(scene, 25)).mean == 1.0


@pytest.mark.parametrize(
    ("measure", "wrong"),
    [
        ("color", {"color": "orange"}),
        ("background", {"background": "purple"}),
        ("shape", {"shape": "triangle"}),
        ("motion", {"motion": "down"}),
        ("pitch", {"shape": "star"}),
    ],
)
def test_a_clip_of_something_else_is_wrong(measure: str, wrong: dict[str, str]) -> None:
    assert judge(RISE, truth(RISE)).shares[measure] == 1.0
    assert judge(replace(RISE, **wrong), truth(RISE)).shares[measure] == 0.0


def broken(clip: Clip, how: str) -> Clip:
    """The clip with one thing wrong."""
    frames, audio = clip.frames, clip.audio
    assert audio is not None
    if how == "backwards":
        frames = frames[::-1].copy()
    elif how == "frozen":
        frames = np.repeat(frames[:1], len(frames), axis=0)
    elif how == "channels":
        frames = frames[..., ::-1].copy()
    elif how == "noise":
        frames = np.random.default_rng(0).integers(0, 256, frames.shape, np.uint8)
    elif how == "grey":
        frames = np.full_like(frames, 128)
    elif how == "late":
        audio = np.roll(audio, round(5 / clip.fps * clip.sample_rate))
    elif how == "sharp":
        audio = np.interp(np.arange(0, len(audio), 2 ** (2 / 12)), np.arange(len(audio)), audio).astype(np.float32)
    elif how == "mute":
        audio = np.zeros_like(audio)
    elif how == "hiss":
        audio = np.random.default_rng(0).normal(0, 0.1, len(audio)).astype(np.float32)
    return Clip(frames=frames, audio=audio, fps=clip.fps)


@pytest.mark.parametrize(
    ("scene", "how", "measures"),
    [
        (RISE, "backwards", ("motion",)),
        (RISE, "frozen", ("motion",)),
        (SLIDE, "frozen", ("motion",)),
        (BOUNCE, "frozen", ("motion", "bounce")),
        (BOUNCE, "channels", ("color", "background")),
        (BOUNCE, "noise", ("motion", "bounce")),
        (BOUNCE, "grey", ("color", "background", "shape", "motion", "bounce")),
        (BOUNCE, "late", ("bounce",)),
        (RISE, "sharp", ("pitch",)),
        (BOUNCE, "sharp", ("pitch",)),
        (BOUNCE, "mute", ("pitch", "bounce", "sound")),
        (SLIDE, "mute", ("pitch", "sound")),
        (RISE, "hiss", ("pitch",)),
        (BOUNCE, "hiss", ("pitch", "bounce", "sound")),
    ],
)
def test_a_broken_clip_loses_just_what_is_broken(scene: Scene, how: str, measures: tuple[str, ...]) -> None:
    shares = judge(scene, broken(truth(scene), how)).shares
    for measure in measures:
        assert shares[measure] is not None
        assert shares[measure] < 0.5, (how, measure, shares)


def test_a_rising_pitch_must_follow_the_picture() -> None:
    """The tone of a resting shape under a rising one is off by half an octave at the end."""
    still = truth(replace(RISE, motion="still"))
    mixed = Clip(frames=truth(RISE).frames, audio=still.audio, fps=24.0)
    assert judge(RISE, mixed).shares["pitch"] == 0.0


def test_a_small_blur_and_a_little_noise_change_nothing() -> None:
    rng = np.random.default_rng(1)
    for scene in (BOUNCE, RISE, SLIDE):
        clip = truth(scene)
        soft = clip.frames.astype(np.float64)
        soft[:, 1:-1, 1:-1] = (soft[:, 1:-1, 1:-1] * 4 + soft[:, :-2, 1:-1] + soft[:, 2:, 1:-1]) / 6
        soft += rng.normal(0, 6, soft.shape)
        frames = soft.clip(0, 255).astype(np.uint8)
        assert judge(scene, Clip(frames=frames, audio=clip.audio, fps=24.0)).mean == 1.0


def test_a_prompt_is_only_judged_by_what_it_asks_for() -> None:
    silent = replace(RISE, sound="silent")
    shares = judge(silent, truth(silent)).shares
    assert shares["pitch"] is None
    assert shares["bounce"] is None
    assert shares["sound"] == 1.0
    picture_only = Clip(frames=truth(RISE).frames, audio=None, fps=24.0)
    assert judge(RISE, picture_only).shares["sound"] is None


def test_contacts_and_knocks_are_matched_both_ways() -> None:
    at = np.array([5.0, 20.0, 35.0])
    assert bounce_share(at, at + 1.9) == 1.0
    assert bounce_share(at, at + 2.1) == 0.0
    assert bounce_share(at, at[:2]) == pytest.approx(2 / 3)
    assert bounce_share(at, np.concatenate([at, [12.0]])) == pytest.approx(3 / 4)
    assert bounce_share(np.array([]), at) == 0.0


def test_an_empty_score_has_no_share() -> None:
    assert np.isnan(Score().share("pitch"))
