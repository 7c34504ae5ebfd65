"""Measure on a checkpoint what the step caches have to know of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from diptych import __version__
from diptych.engine.engine import Engine
from diptych.engine.progress import OnProgress
from diptych.errors import RequestError
from diptych.model.checkpoint import Checkpoint
from diptych.request import ClipRequest
from diptych.sampling.caches.calibration import Calibration, Measured, Setting

PROMPTS = (
    "waves break on a rocky shore at dusk while gulls cry",
    "a street musician plays the violin under a stone arch, people walk by, close-up of the hands",
    "a steam train leaves a small station in the snow, the whistle sounds twice",
    "rain on a tin roof, a cat watches the drops run down the window",
    "a woman laughs and says hello in a sunny kitchen, cups clink",
)
"""Different motion, light and sound, so that the mean of what is measured suits most prompts."""

OnClip = Callable[[int, int, bool], None]


def calibrate(
    engine: Engine,
    base: ClipRequest,
    prompts: Sequence[str] = PROMPTS,
    *,
    on_step: OnProgress | None = None,
    on_clip: OnClip | None = None,
) -> Calibration:
    """Make a clip of each prompt, nothing left out, and keep what was recorded under the checkpoint's fingerprint.

    base: everything but the prompt. Written after each clip; what is there already is not measured again, so a run
    that was stopped goes on where it was.
    on_clip: told (done, total, whether it had been measured before).
    Raises `RequestError` for a distilled checkpoint, or fewer than three steps.
    """
    checkpoint = engine.checkpoint
    fingerprint = checkpoint.fingerprint
    assert fingerprint is not None, "an engine has its weights"
    calibration = Calibration.find(fingerprint) or Calibration(fingerprint)
    calibration.source = calibration.source or f"measured with diptych {__version__}"
    base = replace(base, seed=0 if base.seed is None else base.seed)
    steps = base.resolve(engine.defaults).steps
    if steps < 3:
        raise RequestError("steps", steps, "3 or more: what is measured is how one step differs from the last")
    for done, prompt in enumerate(prompts, start=1):
        request = replace(base, prompt=prompt)
        setting = Setting.of(request.resolve(engine.defaults))
        assert request.seed is not None
        before = calibration.holds(setting, prompt, request.seed)
        if not before:
            clip = engine.generate(request, on_step, cache="record")
            if clip is None:  # a rank of torchrun that is not the first
                continue
            told = clip.report["cache"]
            pairs = [list(pair) for pair in told["pairs"]]
            calibration.measured.append(Measured(setting, prompt, request.seed, told["ratios"], pairs))
            calibration.write()
        if on_clip is not None:
            on_clip(done, len(prompts), before)
    return calibration


def adopt(checkpoint: Checkpoint, path: Path) -> Calibration:
    """Use for this checkpoint what was measured on another, such as the one it was finetuned from; reports say so.

    Raises `CheckpointError` for a file that is no calibration.
    """
    assert checkpoint.fingerprint is not None
    other = Calibration.read(path)
    if other.fingerprint == checkpoint.fingerprint:
        return other
    adopted = Calibration(checkpoint.fingerprint, other.measured, f"adopted from checkpoint {other.fingerprint}")
    adopted.write()
    return adopted
