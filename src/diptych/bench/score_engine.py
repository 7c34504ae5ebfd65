"""The score of an engine: what `diptych score` runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from diptych.bench.score import OnClip, Score, failed, judge
from diptych.bench.toyworld import FPS, FRAMES, HEIGHT, WIDTH, Scene
from diptych.engine.engine import Engine
from diptych.engine.progress import OnProgress
from diptych.errors import ClipError
from diptych.media.clip import Clip
from diptych.request import ClipRequest

SIZE: dict[str, Any] = {"width": WIDTH, "height": HEIGHT, "frames": FRAMES, "fps": FPS}
QUICK = 12
"""Prompts of a quick run, one seed each."""


def score_engine(
    engine: Engine,
    chosen: Sequence[tuple[Scene, str]],
    seeds: Iterable[int],
    *,
    batch: int = 4,
    on_step: OnProgress | None = None,
    on_clip: OnClip | None = None,
    **fields: Any,
) -> Score | None:
    """Make a clip of every prompt with every seed, `batch` of them at a time, and judge them.

    fields: of the requests, such as steps and guidance. A clip that the engine refuses to call finished has everything
    wrong. Returns None on a rank of torchrun other than the first.
    """
    wanted = [(scene, prompt, seed) for seed in seeds for scene, prompt in chosen]
    result = Score()
    for start in range(0, len(wanted), batch):
        some = wanted[start : start + batch]
        requests = [ClipRequest(prompt, seed=seed, **SIZE, **fields) for _, prompt, seed in some]
        clips = _clips(engine, requests, on_step)
        if clips is None:
            continue
        for (scene, prompt, seed), clip in zip(some, clips, strict=True):
            verdict = failed(scene, prompt, seed) if clip is None else judge(scene, clip, prompt, seed)
            result.verdicts.append(verdict)
            if on_clip is not None:
                on_clip(len(result.verdicts), len(wanted), verdict)
    return result if result.verdicts else None


def _clips(engine: Engine, requests: list[ClipRequest], on_step: OnProgress | None) -> list[Clip | None] | None:
    """Clips of one batch, None in place of one that is not fit to be called a clip."""
    try:
        clips = engine.generate_batch(requests, on_step)
        return None if clips is None else list(clips)
    except ClipError:
        if len(requests) == 1:
            return [None]
    found: list[Clip | None] = []
    for request in requests:
        one = _clips(engine, [request], on_step)
        if one is None:
            return None
        found += one
    return found
