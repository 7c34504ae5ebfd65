"""What a checkpoint can be made to do faster, and what each way costs: the frontier of time against quality."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from diptych.bench.compare import compare
from diptych.engine.engine import Engine
from diptych.engine.progress import OnProgress
from diptych.errors import RequestError
from diptych.media.clip import Clip
from diptych.media.files import replacing
from diptych.model.checkpoint import Checkpoint
from diptych.request import ClipRequest

CACHES = (
    "magcache:0.06",
    "magcache:0.12",
    "magcache:0.24",
    "navicache:0.025",
    "navicache:0.05",
    "navicache:0.1",
    "firstblock:0.04",
    "firstblock:0.08",
    "firstblock:0.16",
    "taylor:1,1",
    "taylor:1,2",
    "taylor:1,3",
    "teacache:0.075",
    "teacache:0.15",
    "teacache:0.3",
)
STEP_SHARES = (0.8, 0.6, 0.5)
"""Exact runs with so many of the steps, for a cache to be held against."""


@dataclass(frozen=True)
class Point:
    """One setting: seconds of denoising a clip, the share of forwards computed, and how far it strays from exact.

    psnr: of the worst frame of all prompts, dB, infinite where nothing differs; ssim: likewise; log_mel: mean, dB, or
    None without sound.
    """

    precision: str
    cache: str
    steps: int
    seconds: float
    computed: float
    psnr: float
    ssim: float
    log_mel: float | None

    def command(self, checkpoint: str) -> str:
        """What to type for it."""
        words = ["diptych generate PROMPT", f"--model {checkpoint}", f"--steps {self.steps}"]
        words += [f"--precision {self.precision}"] * (self.precision != "exact")
        words += [f"--cache {self.cache}"] * (self.cache != "none")
        return " ".join(words)

    def to_dict(self) -> dict[str, Any]:
        values = dict(self.__dict__)
        return values | {"psnr": self.psnr if np.isfinite(self.psnr) else None}


def tune(
    checkpoint: Checkpoint,
    base: ClipRequest,
    prompts: Sequence[str],
    *,
    precisions: Sequence[str] = ("exact",),
    caches: Sequence[str] = CACHES,
    on_progress: OnProgress | None = None,
    on_point: Callable[[Point], None] | None = None,
    **options: Any,
) -> list[Point]:
    """Make each prompt's clip in each setting and hold it against the exact one of the same seed; exact comes first.

    Caches that were not calibrated for the request are left out. options: of `Engine.load`. Times are those of
    denoising, mean over the prompts, after one clip that warms up.
    """
    resolved = base.resolve(checkpoint.defaults)
    base = replace(base, steps=resolved.steps, seed=0 if base.seed is None else base.seed)
    points: list[Point] = []
    truth: list[Clip] = []
    fewer = sorted({max(round(share * resolved.steps), 1) for share in STEP_SHARES} - {resolved.steps}, reverse=True)
    for precision in dict.fromkeys(("exact", *precisions)):
        with Engine.load(checkpoint, precision=precision, on_progress=on_progress, **options) as engine:
            _clips(engine, replace(base, steps=1), prompts[:1], "none", on_progress)
            settings = [("none", resolved.steps), *(("none", n) for n in fewer)]
            settings += [] if checkpoint.distilled else [(cache, resolved.steps) for cache in caches]
            for cache, steps in settings:
                try:
                    clips = _clips(engine, replace(base, steps=steps), prompts, cache, on_progress)
                except RequestError as error:
                    if error.field == "cache":
                        continue
                    raise
                truth = truth or clips
                points.append(_point(precision, cache, steps, truth, clips))
                if on_point is not None:
                    on_point(points[-1])
    return points


def frontier(points: Sequence[Point]) -> list[Point]:
    """Those that no other beats in both time and worst frame, the slowest first."""
    best = [p for p in points if not any(q.seconds < p.seconds and q.psnr >= p.psnr for q in points)]
    return sorted(best, key=lambda point: -point.seconds)


def table(points: Sequence[Point], checkpoint: str, budget: float) -> str:
    """The frontier; the fastest point whose worst frame keeps `budget` dB is marked."""
    rows = frontier(points)
    kept = [point for point in rows if point.psnr >= budget]
    lines = [f"{'seconds':>9}{'computed':>10}{'PSNR':>8}{'SSIM':>8}{'log-mel':>9}   command"]
    for point in rows:
        mel = "-" if point.log_mel is None else f"{point.log_mel:.2f}"
        mark = " <" if kept and point is kept[-1] else ""
        lines.append(
            f"{point.seconds:9.2f}{point.computed:10.0%}{point.psnr:8.2f}{point.ssim:8.4f}{mel:>9}   "
            f"{point.command(checkpoint)}{mark}"
        )
    return "\n".join(lines)


def plot(points: Sequence[Point], path: Path, budget: float) -> None:
    """Draw all points, and a line through the frontier. Raises `MediaError`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    top = max((p.psnr for p in points if np.isfinite(p.psnr)), default=40.0) + 6
    best = frontier(points)
    figure, axes = plt.subplots(figsize=(9, 5.5), layout="constrained")
    axes.plot([p.seconds for p in best], [min(p.psnr, top) for p in best], color="#4063d8", linewidth=1.5, zorder=1)
    names = list(dict.fromkeys(p.cache.partition(":")[0] for p in points))
    for number, name in enumerate(names):
        mine = [p for p in points if p.cache.partition(":")[0] == name]
        label = "computed, fewer steps or another precision" if name == "none" else name
        axes.scatter([p.seconds for p in mine], [min(p.psnr, top) for p in mine], 46, f"C{number}", label=label)
    axes.axhline(budget, color="#888", linestyle=":", linewidth=1)
    axes.set_xlabel("seconds of denoising a clip")
    axes.set_ylabel("PSNR of the worst frame against exact, dB (exact at the top)")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=150)
    plt.close(figure)


def _clips(
    engine: Engine, base: ClipRequest, prompts: Sequence[str], cache: str, on_step: OnProgress | None
) -> list[Clip]:
    clips = [engine.generate(replace(base, prompt=prompt), on_step, cache=cache) for prompt in prompts]
    assert all(clip is not None for clip in clips), "tuning runs in one program"
    return [clip for clip in clips if clip is not None]


def _point(precision: str, cache: str, steps: int, truth: Sequence[Clip], clips: Sequence[Clip]) -> Point:
    held = [compare(a, b) for a, b in zip(truth, clips, strict=True)]
    forwards = [clip.report["forwards"] for clip in clips]
    mels = [result.log_mel for result in held if result.log_mel is not None]
    return Point(
        precision,
        cache,
        steps,
        float(np.mean([clip.report["seconds"]["denoise"] for clip in clips])),
        float(np.mean([f["computed"] / f["total"] for f in forwards])),
        min(float(result.psnr.min()) for result in held),
        min(float(result.ssim.min()) for result in held),
        float(np.mean(mels)) if mels else None,
    )
