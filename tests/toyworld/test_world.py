"""The toy world: the same seed gives the same clip, nothing leaves the picture, captions use known words only."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from tools.toyworld.preview import preview
from tools.toyworld.render import sounds, to_device
from tools.toyworld.source import draw
from tools.toyworld.text import MAX_TOKENS
from tools.toyworld.tracks import BOTTOM, COMPANION_AT, SIDE, collate, draw_track

from diptych.bench.toyworld import FLOOR, HEIGHT, MOTIONS, PITCH_STEP, WIDTH, Scene, allowed, draw_scene
from diptych.bench.toyworld_captions import caption, score_prompts, words
from diptych.model.vocabulary import clip_tokenizer, qwen_tokenizer


def test_a_clip_is_decided_by_seed_and_number() -> None:
    many, one = draw(5, 0, 8), draw(5, 6, 1)
    assert many.captions[6] == one.captions[0]
    for a, b in zip(one.render(), many.render(), strict=True):
        torch.testing.assert_close(a[0], b[6], rtol=0, atol=0)
    assert draw(6, 6, 1).captions != one.captions


def test_training_never_sees_a_held_out_combination() -> None:
    trained = {track.scene.key for track in draw(1, 0, 600).tracks}
    asked = {scene.key for scene, _ in score_prompts(64)}
    assert len(asked) == 64
    assert not trained & asked


def test_score_prompts_are_fixed_and_ask_for_every_motion() -> None:
    first = score_prompts(64)
    assert first == score_prompts(64)
    assert first[:10] == score_prompts(10)
    assert {scene.motion for scene, _ in first} == set(MOTIONS)


@pytest.mark.parametrize("motion", MOTIONS)
def test_the_shape_stays_in_the_picture(motion: str) -> None:
    rng = np.random.default_rng(3)
    for _ in range(40):
        scene = draw_scene(rng)
        while scene.motion != motion:
            scene = draw_scene(rng)
        track = draw_track(scene, rng)
        side, bottom = SIDE[scene.shape] * track.radius, BOTTOM[scene.shape] * track.radius
        if motion != "spinning":
            assert (track.x - side).min() >= 0, scene
            assert (track.x + side).max() <= WIDTH, scene
            assert (track.y + bottom).max() <= max(FLOOR + 0.01, HEIGHT - 10), scene
        assert (track.y - 1.42 * track.radius).min() >= -1.5, scene
        if scene.companion is not None:
            x, y = COMPANION_AT[scene.companion[2]]
            apart = np.maximum(abs(track.x - x), abs(track.y - y)).min()
            assert apart > 7.5, scene


def test_a_bouncing_shape_touches_the_floor_at_its_contacts() -> None:
    rng = np.random.default_rng(4)
    for shape in BOTTOM:
        track = draw_track(Scene(shape, "red", "blue", "bouncing", "knock"), rng)
        assert track.contacts
        for contact in track.contacts:
            near = track.y[int(contact) : int(contact) + 2] + BOTTOM[shape] * track.radius[0]
            assert FLOOR - 9 < near.max() <= FLOOR + 0.01


def test_every_word_of_a_caption_is_one_token_of_both_tokenizers() -> None:
    known = words()
    qwen, clip = qwen_tokenizer(known), clip_tokenizer(known)
    rng = np.random.default_rng(0)
    for _ in range(200):
        text = caption(draw_scene(rng), rng, "slow")
        spelled = re.findall(r"[A-Za-z]+|[.,]", text)
        assert set(spelled) <= set(known), text
        assert len(qwen(text)["input_ids"]) == len(spelled) < MAX_TOKENS, text
        assert len(clip(text)["input_ids"]) == len(spelled) + 2, text


def test_names_of_colours_never_meet() -> None:
    assert not allowed("blue", "blue")
    assert not allowed("pink", "beige")
    assert allowed("red", "blue")


def test_a_tone_repeats_with_every_mel_frame() -> None:
    """A vocoder sees mel frames only: a steady tone must be the same in each."""
    rng = np.random.default_rng(0)
    track = draw_track(Scene("star", "red", "blue", "left", "hum"), rng)
    wave = sounds(to_device(collate([track]), "cpu"))[0]
    torch.testing.assert_close(wave[512 * 50 : 512 * 51], wave[512 * 90 : 512 * 91], rtol=0, atol=1e-6)
    spectrum = torch.fft.rfft(wave[512 * 40 : 512 * 120]).abs()
    assert float(spectrum.argmax()) * 44_100 / (512 * 80) == pytest.approx(12 * PITCH_STEP, abs=1)


def test_silence_is_silent_and_lengths_are_those_of_the_latents() -> None:
    rng = np.random.default_rng(0)
    track = draw_track(Scene("star", "red", "blue", "left", "silent"), rng)
    wave = sounds(to_device(collate([track.cut(25)]), "cpu"))
    assert wave.shape == (1, 45 * 1024)
    assert wave.abs().max() == 0


def test_preview_draws_a_picture(tmp_path: object) -> None:
    from pathlib import Path

    from PIL import Image

    path = preview(Path(str(tmp_path)) / "a" / "preview.png", count=2)
    assert Image.open(path).size == (1542, 284)
