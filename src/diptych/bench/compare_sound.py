"""How far two sounds differ."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch

Sound = npt.NDArray[np.float32]

FFT, HOP, MELS = 2048, 512, 80
FLOOR = 1e-4
"""Magnitude below which a mel band counts as silent: 80 dB under a full-scale tone's amplitude of 1."""


def log_mel_distance(a: Sound, b: Sound, sample_rate: int) -> float:
    """Mean absolute difference of the log-mel spectra in dB: 80 bands up to half the rate, windows of 2,048 samples."""
    if len(a) == 0:
        return 0.0
    bands = torch.from_numpy(mel_filters(sample_rate))
    window = torch.hann_window(FFT, dtype=torch.float64)
    spectra = []
    for sound in (a, b):
        padded = torch.from_numpy(np.pad(sound.astype(np.float64), (0, max(FFT - len(sound), 0))))
        spectrum = torch.stft(padded, FFT, HOP, window=window, center=False, return_complex=True).abs()
        spectra.append(20 * torch.log10((bands @ spectrum * 2 / window.sum()).clamp(min=FLOOR)))
    return (spectra[0] - spectra[1]).abs().mean().item()


def si_sdr(a: Sound, b: Sound) -> float:
    """Scale-invariant signal-to-distortion ratio of `b` with `a` as the truth, dB; infinite for equal sounds.

    Le Roux et al. 2019, on signals without their means.
    """
    truth, heard = (x.astype(np.float64) - x.mean(dtype=np.float64) if len(x) else np.zeros(1) for x in (a, b))
    if np.array_equal(truth, heard):
        return math.inf
    power = float(truth @ truth)
    target = truth * (float(heard @ truth) / power) if power else np.zeros_like(truth)
    noise = heard - target
    signal, distortion = float(target @ target), float(noise @ noise)
    if not distortion:
        return math.inf
    return 10 * math.log10(signal / distortion) if signal else -math.inf


def mel_filters(sample_rate: int) -> npt.NDArray[np.float64]:
    """(MELS, FFT / 2 + 1) triangles, evenly spaced on the mel scale 2595 log10(1 + f / 700); each sums to one."""
    top = 2595 * math.log10(1 + sample_rate / 2 / 700)
    edges = 700 * (10 ** (np.linspace(0, top, MELS + 2) / 2595) - 1)
    hertz = np.linspace(0, sample_rate / 2, FFT // 2 + 1)
    rising = (hertz - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
    falling = (edges[2:, None] - hertz) / (edges[2:] - edges[1:-1])[:, None]
    triangles = np.maximum(0, np.minimum(rising, falling))
    # The lowest bands are narrower than a bin: the nearest bin stands for such a one.
    for band in np.flatnonzero(triangles.sum(axis=1) == 0):
        triangles[band, np.abs(hertz - edges[band + 1]).argmin()] = 1
    filters: npt.NDArray[np.float64] = triangles / triangles.sum(axis=1, keepdims=True)
    return filters
