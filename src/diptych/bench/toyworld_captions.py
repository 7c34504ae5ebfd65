"""Captions of the toy world in plain English, and the words they are made of."""

from __future__ import annotations

import re
from itertools import product

import numpy as np

from diptych.bench.toyworld import BACKGROUND_COLORS, PITCH, SHAPE_COLORS, Scene, draw_scene, pick

_MOTION = {
    "left": ("moves to the left", "slides left", "drifts to the left", "glides left", "travels from right to left"),
    "right": (
        "moves to the right",
        "slides right",
        "drifts to the right",
        "glides right",
        "travels from left to right",
    ),
    "up": ("rises", "moves up", "floats upward", "climbs up", "goes up"),
    "down": ("sinks", "moves down", "falls", "descends", "goes down"),
    "bouncing": ("bounces", "bounces up and down", "is bouncing", "hops", "keeps bouncing"),
    "orbiting": ("orbits", "circles around", "moves in a circle", "goes round and round", "is orbiting"),
    "growing": ("grows", "gets bigger", "is growing", "swells", "becomes larger"),
    "shrinking": ("shrinks", "gets smaller", "is shrinking", "dwindles", "becomes smaller"),
    "spinning": ("spins", "rotates", "is spinning", "turns around itself", "whirls"),
    "still": ("stands still", "does not move", "rests", "stays in place", "sits still"),
}
_PACE = {"slow": ("slowly", "at a slow pace"), "fast": ("quickly", "fast")}
_SOUND = {
    "hum": ("", "", "humming", "with a steady hum", "with a soft tone"),
    "beep": ("beeping", "with short beeps", "with a series of beeps"),
    "knock": ("", "", "with a knock at each bounce", "thumping on the floor", "with a click at each bounce"),
    "silent": ("in silence", "without a sound", "silently"),
}
_PLACE = {
    "wall": ("on a {b} background", "in front of a {b} wall", "over a {b} background", "against a {b} wall"),
    "floor": ("on a {b} floor", "over a {b} floor"),
}
_REST = ("a small {c} {s} rests in the {p} corner", "a little {c} {s} stands in the upper {p} corner")
_FORMS = (
    "{subject} {act}{pace} {place}{sound}{rest}.",
    "{place_first}, {subject} {act}{pace}{sound}{rest}.",
    "{subject} {act}{pace}{sound} {place}{rest}",
    "{subject} {act}{pace} {place}{sound}{rest}",
    "A video of {subject} that {act}{pace} {place}{sound}{rest}.",
)


def caption(scene: Scene, rng: np.random.Generator, pace: str | None = None) -> str:
    """One sentence for the scene; `pace` "slow" or "fast" is told where given."""
    kinds = ("wall", "wall", "floor") if scene.motion in ("bouncing", "still", "spinning") else ("wall",)
    place = pick(rng, _PLACE[pick(rng, kinds)]).format(b=scene.background)
    rest = ""
    if scene.companion is not None:
        shape, color, side = scene.companion
        rest = pick(rng, (", while ", " and ")) + pick(rng, _REST).format(c=color, s=shape, p=side)
    sound = pick(rng, _SOUND[scene.sound])
    text = pick(rng, _FORMS).format(
        subject=pick(rng, ("a", "a", "one", "a bright")) + f" {scene.color} {scene.shape}",
        act=pick(rng, _MOTION[scene.motion]),
        pace=" " + pick(rng, _PACE[pace]) if pace else "",
        place=place,
        place_first=place,
        sound=(pick(rng, (", ", " ")) if sound else "") + sound,
        rest=rest,
    )
    text = re.sub(r"\ba (?=orange\b)", "an ", text)
    return text[0].upper() + text[1:] if rng.random() < 0.5 else text


def words() -> list[str]:
    """Every word that a caption or the default negative prompt can hold, both capitalised and not."""
    phrases = [*_FORMS, *_REST, "a an one A An One bright On In Over Against while and . ,"]
    phrases += [p for table in (_MOTION, _PACE, _SOUND, _PLACE) for choices in table.values() for p in choices]
    phrases += [*PITCH, *SHAPE_COLORS, *BACKGROUND_COLORS, "left right"]
    phrases.append(
        "Static, 2D cartoon, cartoon, 2d animation, paintings, images, "
        "worst quality, low quality, ugly, deformed, walking backwards"
    )
    found = re.findall(r"[A-Za-z]+|[.,]", " ".join(re.sub(r"\{\w+\}", " ", p) for p in phrases))
    return sorted(set(found))


def score_prompts(count: int = 64) -> list[tuple[Scene, str]]:
    """The first `count` held-out prompts: each motion and shape in turn, everything else by a fixed seed."""
    rng = np.random.default_rng(20_26)
    kinds = [k for k in product(PITCH, _MOTION) if k != ("circle", "spinning")]
    chosen: list[tuple[Scene, str]] = []
    seen: set[str] = set()
    while len(chosen) < count:
        order = [kinds[i] for i in rng.permutation(len(kinds))]
        for shape, motion in order:
            scene = draw_scene(rng, held_out=True)
            while (scene.shape, scene.motion) != (shape, motion) or scene.key in seen:
                scene = draw_scene(rng, held_out=True)
            seen.add(scene.key)
            chosen.append((scene, caption(scene, rng)))
    return chosen[:count]
