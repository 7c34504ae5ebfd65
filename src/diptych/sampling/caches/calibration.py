"""What was measured on a checkpoint, kept in the user's cache under its fingerprint; and what its authors published."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from importlib.resources import files
from pathlib import Path

import numpy as np

from diptych.errors import CheckpointError
from diptych.media.files import check_writable, replacing
from diptych.request import ResolvedRequest
from diptych.sampling.caches.base import Known

DEGREE = 4
"""Of TeaCache's polynomial, as its authors fit it."""


@dataclass(frozen=True)
class Setting:
    """Under what ratios were measured. mode: t2va or i2va."""

    mode: str
    width: int
    height: int
    frames: int
    steps: int
    guided: bool
    sigma_grid: str

    @classmethod
    def of(cls, resolved: ResolvedRequest) -> Setting:
        return cls(
            "i2va" if resolved.request.image is not None else "t2va",
            resolved.width,
            resolved.height,
            resolved.frames,
            resolved.steps,
            resolved.guided,
            resolved.request.sigma_grid,
        )

    def __str__(self) -> str:
        return f"{self.mode} {self.width}x{self.height}x{self.frames}, {self.steps} steps"

    def distance(self, other: Setting) -> tuple[bool, float, float]:
        """How far apart, for a choice among several: noise grid first, then pixels, then steps."""
        pixels = [math.log(s.width * s.height * s.frames) for s in (self, other)]
        return self.sigma_grid != other.sigma_grid, abs(pixels[0] - pixels[1]), abs(math.log(self.steps / other.steps))


@dataclass(frozen=True)
class Measured:
    """One clip's record: ratios[lane][step] and pairs of changes, as `Record` reports them."""

    setting: Setting
    prompt: str
    seed: int
    ratios: list[list[float]]
    pairs: list[list[float]] = field(default_factory=list)


@dataclass
class Calibration:
    """All clips measured on the checkpoint with this fingerprint. source: for the report."""

    fingerprint: str
    measured: list[Measured] = field(default_factory=list)
    source: str = ""

    @classmethod
    def find(cls, fingerprint: str | None) -> Calibration | None:
        """The calibration in the user's cache, if there is one."""
        if fingerprint is None:
            return None
        path = calibration_path(fingerprint)
        return cls.read(path, fingerprint) if path.is_file() else None

    @classmethod
    def read(cls, path: Path, fingerprint: str | None = None) -> Calibration:
        """Raises `CheckpointError` for a damaged file, or one of another checkpoint than `fingerprint`."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            measured = [
                Measured(Setting(**one["setting"]), **{f.name: one[f.name] for f in fields(Measured)[1:]})
                for one in values["measured"]
            ]
            calibration = cls(str(values["fingerprint"]), measured, str(values.get("source", "")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{path} is no calibration, or is damaged ({error}); remove it") from None
        if fingerprint is not None and calibration.fingerprint != fingerprint:
            raise CheckpointError(
                f"{path} was measured on the checkpoint {calibration.fingerprint}, not on this one, {fingerprint}; "
                "run diptych calibrate, or adopt it with diptych calibrate --adopt"
            )
        return calibration

    def write(self, path: Path | None = None) -> Path:
        """Write to `path`, by default to where `find` looks. Raises `MediaError` where that cannot be done."""
        path = path or calibration_path(self.fingerprint)
        check_writable(path, make_folder=True)
        with replacing(path) as temporary:
            temporary.write_text(json.dumps(asdict(self), indent=1), encoding="utf-8")
        return path

    def holds(self, setting: Setting, prompt: str, seed: int) -> bool:
        return any((one.setting, one.prompt, one.seed) == (setting, prompt, seed) for one in self.measured)

    def known(self, resolved: ResolvedRequest) -> Known | None:
        """What the nearest measured setting of the same mode says, resampled to the steps of the request; or None."""
        asked = Setting.of(resolved)
        fitting = {
            one.setting
            for one in self.measured
            if one.setting.mode == asked.mode and (one.setting.guided or not asked.guided)
        }
        if not fitting:
            return None
        nearest = min(fitting, key=lambda setting: (setting.distance(asked), str(setting)))
        chosen = [one for one in self.measured if one.setting == nearest]
        ratios = np.mean([one.ratios for one in chosen], axis=0)
        polynomial, span = fit([pair for one in chosen for pair in one.pairs])
        return Known(
            tuple(tuple(resample(lane, asked.steps)) for lane in ratios.tolist()),
            polynomial,
            span,
            f"{self.source or 'measured'}: {nearest}",
        )


def resample(of_lane: Sequence[float], steps: int) -> list[float]:
    """Nearest neighbours, first on first and last on last, as the native code resamples one lane's ratios."""
    if steps == 1:
        return [of_lane[-1]]
    scale = (len(of_lane) - 1) / (steps - 1)
    places: list[int] = np.round(np.arange(steps) * scale).astype(int).tolist()
    return [of_lane[place] for place in places]


def fit(pairs: Sequence[Sequence[float]]) -> tuple[tuple[float, ...], tuple[float, float]]:
    """The polynomial through pairs of changes, highest power first, and the span of the first of them."""
    if len(pairs) <= 2 * DEGREE:
        return (), (0.0, 0.0)
    x, y = np.asarray(pairs, dtype=np.float64).T
    return tuple(np.polyfit(x, y, DEGREE).tolist()), (float(x.min()), float(x.max()))


def calibration_path(fingerprint: str) -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "diptych" / "calibration" / f"{fingerprint}.json"


@cache
def published() -> Calibration:
    """The ratios that are published for Pro: text to video with sound, 864x480x125, 50 steps, guided."""
    values = json.loads((files("diptych.sampling.caches") / "published.json").read_text(encoding="utf-8"))
    setting = Setting("t2va", 864, 480, 125, 50, True, "native")
    return Calibration("", [Measured(setting, "", 0, [values["cond"], values["uncond"]])], values["source"])
