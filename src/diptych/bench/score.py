"""How good are the clips? Held-out prompts of the toy world, measured from pixels and samples, in one table.

`score` takes any callable that makes clips, so the same table judges a checkpoint, a step cache, a precision or a
layout: what a setting costs is the difference of two tables.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from diptych.bench.toyworld import PITCH, PITCH_STEP, PIXELS_PER_OCTAVE, Scene
from diptych.bench.toyworld_captions import score_prompts
from diptych.bench.toyworld_picture import PictureReading, read_picture
from diptych.bench.toyworld_sound import SoundReading, read_sound, semitones
from diptych.media.clip import Clip

MEASURES = {
    "color": ("colour of the main shape", 0.95),
    "background": ("colour of the background", 0.95),
    "motion": ("direction of motion", 0.90),
    "shape": ("class of the shape", 0.85),
    "pitch": ("pitch within a semitone", 0.90),
    "bounce": ("bounce sounds within 2 frames", 0.80),
    "sound": ("kind of sound", None),
}
"""Name, what it says in the table, and the share that the demo model has to reach; the last one is only shown."""

BOUNCE_FRAMES = 2.0

Generate = Callable[[str, int], Clip]
"""Make the clip of a prompt and a seed."""
OnClip = Callable[[int, int, "Verdict"], None]


@dataclass(frozen=True)
class Verdict:
    """One clip: of each measure the share that is right, 0 to 1, or `None` where the prompt asks for none.

    picture: what was read from the pixels; `None` of a clip that could not be made.
    """

    scene: Scene
    prompt: str
    seed: int
    picture: PictureReading | None
    shares: dict[str, float | None]

    @property
    def mean(self) -> float:
        told = [share for share in self.shares.values() if share is not None]
        return sum(told) / len(told)


@dataclass
class Score:
    """All verdicts of one run, and the table of them."""

    verdicts: list[Verdict] = field(default_factory=list)

    def share(self, measure: str) -> float:
        """Mean share over the clips that the measure applies to; NaN if there is none."""
        told = [s for v in self.verdicts if (s := v.shares[measure]) is not None]
        return float(np.mean(told)) if told else float("nan")

    def count(self, measure: str) -> int:
        return sum(v.shares[measure] is not None for v in self.verdicts)

    @property
    def total(self) -> float:
        """Mean of the measures that have a goal."""
        return float(np.nanmean([self.share(name) for name, (_, goal) in MEASURES.items() if goal is not None]))

    @property
    def missed(self) -> list[str]:
        """The measures, of those that any prompt asked for, that stay below their goals."""
        goals = {name: goal for name, (_, goal) in MEASURES.items() if goal is not None and self.count(name)}
        return [name for name, goal in goals.items() if self.share(name) < goal]

    def to_dict(self) -> dict[str, Any]:
        """JSON values; a measure that no prompt asked for has the share `None`."""
        rows = {n: {"share": self.share(n) if self.count(n) else None, "clips": self.count(n)} for n in MEASURES}
        clips = [{"prompt": v.prompt, "seed": v.seed, "scene": v.scene.key, "shares": v.shares} for v in self.verdicts]
        return {"clips": len(self.verdicts), "total": self.total, "measures": rows, "verdicts": clips}

    def table(self) -> str:
        lines = [f"{'measure':32}{'right':>8}{'goal':>8}{'clips':>8}"]
        for name, (text, goal) in MEASURES.items():
            wanted = f"{100 * goal:6.0f} %" if goal is not None else ""
            share = f"{100 * self.share(name):6.1f} %" if self.count(name) else f"{'-':>8}"
            lines.append(f"{text:32}{share}{wanted:>8}{self.count(name):8}")
        lines.append(f"{'mean of those with a goal':32}{100 * self.total:6.1f} %{'':8}{len(self.verdicts):8}")
        return "\n".join(lines)


def score(
    generate: Generate,
    *,
    prompts: Sequence[tuple[Scene, str]] | int = 64,
    seeds: Iterable[int] = (0, 1, 2),
    on_clip: OnClip | None = None,
) -> Score:
    """Generate and judge `prompts` (that many held-out ones, or those given) with every seed.

    on_clip: told (done, total, verdict) after each clip.
    """
    chosen = score_prompts(prompts) if isinstance(prompts, int) else prompts
    wanted = list(seeds)
    result = Score()
    for seed in wanted:
        for scene, prompt in chosen:
            verdict = judge(scene, generate(prompt, seed), prompt, seed)
            result.verdicts.append(verdict)
            if on_clip is not None:
                on_clip(len(result.verdicts), len(chosen) * len(wanted), verdict)
    return result


def judge(scene: Scene, clip: Clip, prompt: str = "", seed: int = 0) -> Verdict:
    """Hold one clip of 96x64 pixels against what its caption says."""
    picture = read_picture(clip.frames)
    shares: dict[str, float | None] = {
        name: float(getattr(picture, name) == getattr(scene, name))
        for name in ("color", "background", "motion", "shape")
    }
    shares |= {"pitch": None, "bounce": None, "sound": None}
    if clip.audio is not None:
        sound = read_sound(clip.audio, clip.sample_rate)
        shares["sound"] = float(sound.kind == scene.sound)
        if scene.sound != "silent":
            shares["pitch"] = float(pitch_error(scene, picture, sound, clip.fps) <= 1.0)
        if scene.sound == "knock":
            shares["bounce"] = bounce_share(picture.contacts, sound.onsets * clip.fps)
    return Verdict(scene, prompt, seed, picture, shares)


def failed(scene: Scene, prompt: str = "", seed: int = 0) -> Verdict:
    """Of a clip that was not made: all is wrong that the prompt asks for."""
    shares: dict[str, float | None] = dict.fromkeys(MEASURES, 0.0)
    if scene.sound == "silent":
        shares["pitch"] = None
    if scene.sound != "knock":
        shares["bounce"] = None
    return Verdict(scene, prompt, seed, None, shares)


def pitch_error(scene: Scene, picture: PictureReading, sound: SoundReading, fps: float) -> float:
    """Median distance in semitones from the pitch that the picture calls for; infinite if hardly anything sounds.

    For a shape that moves up or down that is the pitch of the height at which it is seen at that moment.
    """
    heard = np.isfinite(sound.hertz)
    if heard.mean() < 0.1:
        return float("inf")
    steps = np.full(len(sound.times), float(PITCH[scene.shape]))
    if scene.motion in ("up", "down"):
        seen = np.flatnonzero(np.isfinite(picture.y))
        if len(seen) == 0:
            return float("inf")
        risen = picture.y[seen[0]] - np.interp(sound.times * fps, seen, picture.y[seen])
        steps = PITCH[scene.shape] * 2 ** (risen / PIXELS_PER_OCTAVE)
    return float(np.median(semitones(sound.hertz[heard], steps[heard] * PITCH_STEP)))


def bounce_share(contacts: npt.NDArray[np.floating], onsets: npt.NDArray[np.floating]) -> float:
    """Contacts heard within `BOUNCE_FRAMES`, of all contacts seen or, if more, all onsets heard; both in frames."""
    if len(contacts) == 0:
        return 0.0
    matched = sum(bool(len(onsets)) and float(np.abs(onsets - c).min()) <= BOUNCE_FRAMES for c in contacts)
    return matched / max(len(contacts), len(onsets))
