"""Decoding sound: the stock waveform, cut to the picture; the level only on request; silence stays silence."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from diptych.codecs.audio import decode_audio
from diptych.errors import ClipError
from diptych.media.clip import SILENCE

A, SAMPLES = 2, 2 * 1024


@pytest.fixture(scope="module")
def latents():
    return torch.randn((2, 40, A), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def stock(pipeline, latents):
    """As the stock pipeline decodes."""
    with torch.no_grad():
        mel = pipeline.audio_vae.decode(latents / pipeline.audio_vae.config.scaling_factor, return_dict=False)[0]
        return pipeline.vocoder(mel, return_dict=False)[0][:, 0].numpy()


def decode(pipeline, latents, samples=SAMPLES, level="clip"):
    return decode_audio(pipeline.audio_vae, pipeline.vocoder, latents, samples, level)


def test_the_waveform_is_stock(pipeline, latents, stock):
    sound = decode(pipeline, latents)
    assert sound.dtype == np.float32
    assert sound.shape == stock.shape == (2, SAMPLES)
    assert stock.std() > 1e-3
    np.testing.assert_allclose(sound, stock, atol=1e-5)


@pytest.mark.parametrize("factor", [0.5302, 0.417])
def test_latents_are_divided_by_this_checkpoints_scaling_factor(pipeline, latents, factor):
    # Seen at the decoder's door: its magnitude-preserving layers forget the scale of what they are given.
    vae = copy.deepcopy(pipeline.audio_vae)
    vae.register_to_config(scaling_factor=factor)
    given = []
    vae.vae.decoder.conv_in.register_forward_pre_hook(lambda module, inputs: given.append(inputs[0]))
    decode_audio(vae, pipeline.vocoder, latents, SAMPLES)
    torch.testing.assert_close(given[0] * factor, latents)
    assert pipeline.audio_vae.config.scaling_factor == 0.5302


def test_the_sound_is_cut_to_the_picture_or_ends_in_silence(pipeline, latents, stock):
    short = decode(pipeline, latents, SAMPLES - 700)
    assert short.shape == (2, SAMPLES - 700)
    np.testing.assert_allclose(short, stock[:, :-700], atol=1e-5)
    longer = decode(pipeline, latents, SAMPLES + 5)
    np.testing.assert_allclose(longer[:, :SAMPLES], stock, atol=1e-5)
    assert not longer[:, SAMPLES:].any()


def test_normalize_raises_each_peak_to_full_scale(pipeline, latents):
    plain, loud = decode(pipeline, latents), decode(pipeline, latents, level="normalize")
    assert np.abs(loud).max(axis=1) == pytest.approx([1, 1])
    np.testing.assert_allclose(loud, plain / np.abs(plain).max(axis=1, keepdims=True), rtol=1e-5)
    assert np.abs(plain).max() < 1


def quieter(vocoder, factor):
    quiet = copy.deepcopy(vocoder)
    quiet.conv_post.weight.data *= factor
    return quiet


def test_silence_stays_silence(pipeline, latents):
    for factor in (0, SILENCE / 10):
        sound = decode_audio(pipeline.audio_vae, quieter(pipeline.vocoder, factor), latents, SAMPLES, "normalize")
        assert np.abs(sound).max() < SILENCE
    audible = decode_audio(pipeline.audio_vae, quieter(pipeline.vocoder, 0.01), latents, SAMPLES, "normalize")
    assert np.abs(audible).max() == pytest.approx(1)


def test_a_loud_vocoder_is_clamped(pipeline, latents):
    sound = decode_audio(pipeline.audio_vae, quieter(pipeline.vocoder, 1000), latents, SAMPLES)
    assert np.abs(sound).max() == 1


def test_sound_that_is_not_finite_is_an_error(pipeline, latents):
    broken = latents.clone()
    broken[0, 0, 1] = float("inf")
    with pytest.raises(ClipError, match="sound is not finite"):
        decode(pipeline, broken)
