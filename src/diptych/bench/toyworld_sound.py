"""Reading the sound of a toy-world clip from its samples: loudness, onsets, pitch. All is measured, nothing learned."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

HOP_SECONDS = 0.005
WINDOW_SECONDS = 0.06
QUIET = 0.01
"""Root mean square below which a window is silence: 25 dB below a hum."""
LOWEST, HIGHEST = 250.0, 2000.0


@dataclass(frozen=True)
class SoundReading:
    """times: middle of each window in seconds; level: its root mean square; hertz: its pitch, NaN where it is silent.

    onsets: seconds at which a sound begins, after silence or over a decaying one.
    """

    times: Array
    level: Array
    hertz: Array
    onsets: Array

    @property
    def silent(self) -> bool:
        return bool(np.percentile(self.level, 98) < QUIET)

    @property
    def sounding(self) -> float:
        """Share of the clip in which something is heard."""
        return float((self.level >= QUIET).mean())

    @property
    def kind(self) -> str:
        """`silent`, `hum` (hardly a gap), `beep` (evenly switched on and off) or `knock` (struck, then decaying)."""
        if self.silent:
            return "silent"
        loud = float(np.percentile(self.level, 95))
        if float((self.level > 0.5 * loud).mean()) > 0.85:
            return "hum"
        # A beep holds its level, a knock loses it at once.
        on = self.level > 0.15 * loud
        held = float((self.level[on] > 0.7 * loud).mean()) if on.any() else 0.0
        return "beep" if held > 0.5 else "knock"


def read_sound(samples: npt.NDArray[np.floating], rate: int) -> SoundReading:
    """samples: (N,) mono in [-1, 1]; rate: samples a second."""
    wave = np.asarray(samples, np.float64)
    hop, window = round(HOP_SECONDS * rate), round(WINDOW_SECONDS * rate)
    padded = np.pad(wave, (window // 2, window))
    count = max(len(wave) // hop, 1)
    frames = np.lib.stride_tricks.sliding_window_view(padded, window)[: count * hop : hop]
    level = np.sqrt((frames**2).mean(axis=1))
    times = np.arange(count) * hop / rate
    return SoundReading(times, level, _pitch(frames, level, rate), _onsets(wave, rate))


def _pitch(frames: Array, level: Array, rate: int) -> Array:
    """The strongest spectral peak between LOWEST and HIGHEST, refined by a parabola through its logarithm."""
    size = 8192
    spectrum = np.abs(np.fft.rfft(frames * np.hanning(frames.shape[1]), size)) + 1e-12
    low, high = int(LOWEST * size / rate), int(HIGHEST * size / rate)
    peak = low + spectrum[:, low:high].argmax(axis=1)
    rows = np.arange(len(frames))
    left, middle, right = (np.log(spectrum[rows, peak + d]) for d in (-1, 0, 1))
    bend = left - 2 * middle + right
    shift = np.where(np.abs(bend) > 1e-9, 0.5 * (left - right) / np.where(bend == 0, 1, bend), 0.0)
    hertz = (peak + np.clip(shift, -0.5, 0.5)) * rate / size
    return np.where(level >= QUIET, hertz, np.nan)


def _onsets(wave: Array, rate: int) -> Array:
    """Moments at which the level of 5 ms rises above twice, and well above, what it was 10 to 40 ms before."""
    hop = round(HOP_SECONDS * rate)
    count = len(wave) // hop
    level = np.sqrt((wave[: count * hop].reshape(count, hop) ** 2).mean(axis=1))
    found: list[float] = []
    loud = max(float(np.percentile(level, 99)), 1e-9)
    if loud < QUIET:
        return np.asarray(found)
    for i in range(2, count):
        before = level[max(0, i - 8) : i - 1]
        rises = level[i] > 0.3 * loud and level[i] > 2.0 * before.mean()
        if rises and (not found or i * HOP_SECONDS - found[-1] > 0.12):
            found.append(i * HOP_SECONDS)
    return np.asarray(found)


def semitones(hertz: npt.NDArray[np.floating], expected: npt.NDArray[np.floating]) -> Array:
    """Distance in semitones, NaN where there is no pitch."""
    ratio = np.asarray(hertz, np.float64) / np.asarray(expected, np.float64)
    return np.asarray(12 * np.abs(np.log2(ratio)), np.float64)
