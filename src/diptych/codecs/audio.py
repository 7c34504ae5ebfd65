"""Audio latents to a waveform: latents, mel spectrogram, samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from diptych.codecs.float32 import full_float32
from diptych.errors import ClipError
from diptych.media.clip import SILENCE
from diptych.request import AudioLevel


@torch.no_grad()
def decode_audio(
    audio_vae: Any, vocoder: Any, latents_BCA: Tensor, samples: int, level: AudioLevel = "clip"
) -> npt.NDArray[np.float32]:
    """Waveforms (B, samples), float32 in -1..1, mono at the VAE's rate (44.1 kHz), of audio latents (B, C, A).

    audio_vae, vocoder: diffusers' `MMAudioVAE` and `MMAudioVocoder`, each run in its own dtype, which TF32 is not,
    and on its own device.
    The scaling factor comes from this checkpoint's config: released checkpoints differ. One latent is 1,024 samples;
    what is longer than `samples` is cut, what is shorter ends in silence.
    level: `clip` keeps the level that was decoded; `normalize` raises each waveform's peak to full scale, except that
    silence (a peak below `SILENCE`) stays what it is.
    Raises `ClipError` when the sound is not finite.
    """
    latents = latents_BCA.to(device=audio_vae.device, dtype=audio_vae.dtype) / audio_vae.config.scaling_factor
    with full_float32(audio_vae.dtype):
        mel = audio_vae.decode(latents, return_dict=False)[0]
    mel = mel.to(device=vocoder.device, dtype=vocoder.dtype)
    with full_float32(vocoder.dtype):
        sound_BA = vocoder(mel, return_dict=False)[0][:, 0].float().cpu()
    if not bool(torch.isfinite(sound_BA).all()):
        raise ClipError("the sound is not finite: the audio VAE or the vocoder gave NaN or infinite samples.")
    sound_BA = sound_BA.clamp(-1, 1)[:, :samples]
    sound_BA = torch.nn.functional.pad(sound_BA, (0, samples - sound_BA.shape[1]))
    if level == "normalize":
        peak_B1 = sound_BA.abs().amax(dim=1, keepdim=True)
        sound_BA = torch.where(peak_B1 < SILENCE, sound_BA, sound_BA / peak_B1.clamp_min(SILENCE))
    waveforms: npt.NDArray[np.float32] = sound_BA.numpy()
    return waveforms
