"""What every step cache costs in quality on a model of the toy world, at three shares of the forwards each.

    python benchmarks/cache_quality.py CHECKPOINT OUT.json [--prompts 64] [--seeds 2] [--steps 50,20] [--seconds 125]

Calibrates on held-out prompts that are not judged, finds by the caches' decisions on these exact clips the thresholds
that compute 65, 50 and 42 % of the forwards, makes the judged prompts' clips exactly and with each setting, and holds
them against the exact clips of the same seeds and against what their prompts say. Every clip decides alone, as it would
on its own. Fewer exact steps stand beside the caches. What would pass --seconds is left out, and named. OUT.json is
written after each setting.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cache_apart import ApartPlan, Whole, replay
from diptych.bench.compare import compare
from diptych.bench.score import MEASURES, failed, judge
from diptych.bench.score_engine import SIZE
from diptych.bench.toyworld import Scene
from diptych.bench.toyworld_captions import score_prompts
from diptych.codecs.audio import decode_audio
from diptych.codecs.video import decode_video
from diptych.engine.components import Components
from diptych.engine.options import Options, pick_device, pick_dtype
from diptych.engine.order import Order, take_batch
from diptych.engine.runner import Job, Runner
from diptych.engine.stages import Stages
from diptych.errors import ClipError
from diptych.media.clip import Clip
from diptych.model.checkpoint import Checkpoint
from diptych.parallel.agreement import Agreement
from diptych.parallel.layout import Layout
from diptych.request import ClipRequest
from diptych.sampling.caches import CachePlan, parse
from diptych.sampling.caches.base import Run
from diptych.sampling.caches.calibration import Calibration, Measured, Setting
from diptych.sampling.caches.magcache import MagCacheSettings, magcache_plan
from diptych.sampling.latents import Latents

SHARES = (0.5, 0.65, 0.42)
"""Of the forwards, that thresholds are found for; the one that the others are weighed by comes first."""
SEARCHED = {
    "magcache": ("magcache:{},2", "magcache:{},2", "magcache:{},3"),
    "navicache": ("navicache:{},align={first}",) * 3,
    "teacache": ("teacache:{},3",) * 3,
    "firstblock": ("firstblock:{},3",) * 3,
} | ({"cachedit": ("cachedit:{},3",) * 3} if find_spec("cache_dit") else {})
COUNTED = ("taylor:1,2", "taylor:1,1", "taylor:1,3")
EXTRA = ("magcache", "navicache", "teacache", "firstblock", "cachedit:,3,order=1", "taylor:0,2", "taylor:2,2")
"""Defaults; and what the order of a Taylor series is worth."""
JUDGED_ALIKE = ("magcache", "taylor")
"""They decide by counting, so a batch decides as each of its clips."""


@dataclass(frozen=True)
class Wanted:
    """One clip to be made and judged."""

    scene: Scene
    prompt: str
    seed: int


class Lab:
    """A loaded checkpoint, the clips that are wanted, and where results go."""

    def __init__(self, given: argparse.Namespace, pool: Any) -> None:
        self.start, self.given, self.pool = time.perf_counter(), given, pool
        device = pick_device(given.device)
        self.checkpoint = Checkpoint.open(given.checkpoint)
        options = Options(self.checkpoint, Layout(), device, pick_dtype(given.dtype, device), timedelta(seconds=600))
        self.runner = Runner(Components.load(options, device, first=True))
        some = score_prompts(given.prompts + given.calibrate)
        self.calibrating = [Wanted(scene, prompt, 1000) for scene, prompt in some[given.prompts :]]
        self.judged = [Wanted(*pair, seed) for seed in range(given.seeds) for pair in some[: given.prompts]]
        self.results: dict[str, Any] = {
            "checkpoint": self.checkpoint.name,
            "fingerprint": self.checkpoint.fingerprint,
            "device": self.runner.components.describe()["device"],
            "dtype": str(options.dtype).removeprefix("torch."),
            "torch": torch.__version__,
            "prompts": given.prompts,
            "seeds": given.seeds,
            "calibrated_on": given.calibrate,
            "tables": {},
            "left_out": [],
        }

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start

    def say(self, text: str) -> None:
        print(f"{self.seconds:6.1f} s  {text}", flush=True)

    def write(self) -> None:
        part = self.given.out.with_suffix(".part")
        part.write_text(json.dumps(self.results, indent=1) + "\n")
        part.replace(self.given.out)

    def orders(self, wanted: Sequence[Wanted], steps: int) -> list[Order]:
        size = SIZE | ({"frames": self.given.frames} if self.given.frames else {})
        requests = [ClipRequest(one.prompt, seed=one.seed, steps=steps, **size) for one in wanted]
        return take_batch(requests, self.checkpoint.defaults)

    def job(self, orders: Sequence[Order]) -> Job:
        return self.runner.prepare(orders, Stages())[0]


class Batch:
    """Some of the judged clips, with the exact ones once they are made."""

    def __init__(self, lab: Lab, wanted: Sequence[Wanted], steps: int) -> None:
        self.lab, self.wanted = lab, wanted
        self.orders = lab.orders(wanted, steps)
        self.job = lab.job(self.orders)
        self.exact: list[Clip | None] = [None] * len(wanted)

    def run(self, plan: CachePlan | None) -> tuple[list[Clip], int, int]:
        """Clips, forwards computed and asked for of all of them together."""
        if plan is not None and plan.settings.name not in JUDGED_ALIKE:
            plan = ApartPlan(plan.settings, plan.calibrations, plan.name, len(self.wanted))
        result = self.lab.runner.denoise(replace(self.job, cache=plan), Stages())
        each = 1 if isinstance(plan, ApartPlan) else len(self.wanted)
        total = result.forwards * len(self.wanted)
        lanes = [] if result.cached is None else result.cached["lanes"]
        computed = sum(lane["computed"] for lane in lanes) * each if lanes else total
        return self.decoded(result.latents), computed, total

    @torch.no_grad()
    def decoded(self, latents: Latents) -> list[Clip]:
        c, first = self.lab.runner.components, self.orders[0].resolved
        plan = c.placement.tiles(first)
        video_BCTYX = latents.video.permute(0, 4, 1, 2, 3).to(c.device)
        frames = decode_video(c.vae, video_BCTYX, plan)
        assert latents.audio is not None
        sound = decode_audio(c.audio_vae, c.vocoder, latents.audio.permute(0, 2, 1), first.samples)
        return [Clip(*pair, first.fps) for pair in zip(frames, sound, strict=True)]

    def judge(self, clips: Sequence[Clip]) -> Any:
        """Starts judging; `.get()` gives what `judged` gives for each clip."""
        work = [
            (one, clip, exact, _fit(clip, order))
            for one, clip, exact, order in zip(self.wanted, clips, self.exact, self.orders, strict=True)
        ]
        return self.lab.pool.map_async(judged, work, chunksize=1)


def _fit(clip: Clip, order: Order) -> bool:
    """Whether an engine would call it finished."""
    try:
        clip.check(order.resolved)
    except ClipError:
        return False
    return True


def judged(work: tuple[Wanted, Clip, Clip | None, bool]) -> dict[str, Any]:
    """In a process of its own: what is right in a clip, and how far it strays from the exact one."""
    start = time.process_time()
    torch.set_num_threads(1)
    one, clip, exact, fit = work
    verdict = judge(one.scene, clip, one.prompt, one.seed) if fit else failed(one.scene, one.prompt, one.seed)
    figures = {} if exact is None else compare(exact, clip).figures
    return {"shares": verdict.shares, "figures": figures, "seconds": time.process_time() - start}


def settings_of(run: Run, kept: Sequence[Whole]) -> list[tuple[str, float | None]]:
    """The settings to be measured, in order, and the share of the forwards that each was sought for."""
    found: list[tuple[str, float | None]] = []
    for place, share in enumerate(SHARES):
        for specs in SEARCHED.values():
            found.append(
                (sought(specs[place].replace("{first}", str(max(run.steps // 5, 1))), share, run, kept), share)
            )
        found.append((COUNTED[place], share))
    return found


def sought(spec: str, share: float, run: Run, kept: Sequence[Whole]) -> str:
    """`spec` with the lowest threshold that computes at most `share`, by its decisions on exact clips."""
    low, high = 1e-3, 4.0
    for _ in range(9):
        middle = (low * high) ** 0.5
        if predicted_share(spec.format(f"{middle:.3g}"), run, kept) <= share:
            high = middle
        else:
            low = middle
    return spec.format(f"{high:.3g}")


def predicted_share(spec: str, run: Run, kept: Sequence[Whole]) -> float:
    settings = parse(spec)
    if isinstance(settings, MagCacheSettings):
        return float(np.mean(magcache_plan(run.known.ratios, settings)))
    return replay(settings, run, kept)


def calibrated(lab: Lab, steps: int) -> tuple[Calibration, list[Whole]]:
    """What exact clips of the calibration's prompts say, and the forwards that they were made of."""
    orders = lab.orders(lab.calibrating, steps)
    plan = ApartPlan(parse("record"), (), lab.checkpoint.name, len(orders), keep=True)
    result = lab.runner.denoise(replace(lab.job(orders), cache=plan), Stages())
    assert result.cached is not None
    calibration = Calibration(lab.checkpoint.fingerprint or "", source="measured here")
    for one, order, told in zip(lab.calibrating, orders, result.cached["clips"], strict=True):
        recorded = told["recorded"]
        measured = Measured(Setting.of(order.resolved), one.prompt, one.seed, recorded["ratios"], recorded["pairs"])
        calibration.measured.append(measured)
    return calibration, plan.started[-1].kept


def summed(outcomes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Shares of what is right in percent, how many clips each is of, and distances from the exact clips."""
    told: dict[str, Any] = {"right": {}, "clips": {}}
    for name in MEASURES:
        shares = [s for outcome in outcomes if (s := outcome["shares"][name]) is not None]
        told["clips"][name] = len(shares)
        told["right"][name] = 100 * float(np.mean(shares)) if shares else None
    if outcomes[0]["figures"]:
        of = {name: np.asarray([o["figures"][name] for o in outcomes], dtype=float) for name in outcomes[0]["figures"]}
        worst = np.minimum(of["worst_psnr"], 99.0)
        told |= {
            "psnr": float(np.minimum(of["psnr"], 99.0).mean()),
            "worst_psnr": {"least": float(worst.min()), "tenth": float(np.quantile(worst, 0.1))}
            | {"median": float(np.median(worst)), "share_30": float((worst >= 30).mean())},
            "ssim": float(of["ssim"].mean()),
            "worst_ssim": float(of["worst_ssim"].min()),
            "log_mel": float(of["log_mel"].mean()),
        }
    return told


class Table:
    """All settings at one number of steps."""

    def __init__(self, lab: Lab, steps: int) -> None:
        self.lab, self.steps = lab, steps
        calibration, kept = calibrated(lab, steps)
        resolved = lab.orders(lab.calibrating[:1], steps)[0].resolved
        known = calibration.known(resolved)
        assert known is not None
        lab.say(f"{steps} steps: calibrated on {len(lab.calibrating)} clips")
        self.settings = settings_of(Run(1 + resolved.guided, steps, Agreement(), known), kept)
        del kept
        lab.say("settings: " + "  ".join(spec for spec, _ in self.settings))
        self.calibration = calibration
        self.told = lab.results["tables"][str(steps)] = {
            "guidance": resolved.guidance,
            "known": {"ratios": known.ratios, "polynomial": known.polynomial, "span": known.span},
            "settings": [],
        }
        size = lab.given.batch
        self.batches = [Batch(lab, lab.judged[n : n + size], steps) for n in range(0, len(lab.judged), size)]
        self.waiting: list[tuple[dict[str, Any], list[Any]]] = []
        self.made: list[list[Clip]] = []
        self.took = 0.0

    def run(self) -> None:
        """The exact clips, every cache at every share, and fewer steps."""
        self.measure("exact", None, None, self.batches)
        for batch, clips in zip(self.batches, self.made, strict=True):
            batch.exact = list(clips)
        self.caches(self.settings)
        for few in (0.65, 0.5):
            steps = round(few * self.steps)
            if self.late(f"{steps} exact steps instead"):
                continue
            batches = [Batch(self.lab, batch.wanted, steps) for batch in self.batches]
            for batch, truth in zip(batches, self.batches, strict=True):
                batch.exact = truth.exact
            self.measure(f"{steps} steps, exact", few, None, batches)

    def caches(self, settings: Sequence[tuple[str, float | None]]) -> None:
        for spec, share in settings:
            if not self.late(spec):
                plan = CachePlan(parse(spec), (self.calibration,), self.lab.checkpoint.name)
                try:
                    self.measure(spec, share, plan, self.batches)
                except Exception as error:  # one that fails costs the others nothing
                    self.lab.results["left_out"].append(f"{spec} ({self.steps} steps) failed: {error!r}")

    def late(self, what: str) -> bool:
        """Whether there is no time for one more setting; then it is named as left out."""
        while len(self.waiting) > 2:  # the processes that judge are behind
            self.collect(most=1)
        given = self.lab.given
        if self.lab.seconds + 1.3 * self.took + given.judging <= given.seconds:
            return False
        self.lab.results["left_out"].append(f"{what} ({self.steps} steps)")
        return True

    def measure(self, spec: str, sought: float | None, plan: CachePlan | None, batches: Sequence[Batch]) -> None:
        start = self.lab.seconds
        computed = total = 0
        self.made, judging = [], []
        for batch in batches:
            clips, some, of = batch.run(plan)
            computed, total = computed + some, total + of
            judging.append(batch.judge(clips))
            self.made.append(clips)
        share = computed / total * batches[0].orders[0].resolved.steps / self.steps
        self.took = self.lab.seconds - start
        row = {"setting": spec, "sought": sought, "computed": share, "seconds": round(self.took, 2)}
        self.waiting.append((row, judging))
        self.lab.say(f"{spec}: {100 * share:.1f} % computed")

    def collect(self, most: int | None = None) -> None:
        """Take in what has been judged: all of it, or the oldest `most` settings."""
        for row, judging in self.waiting[:most]:
            outcomes = [outcome for part in judging for outcome in part.get()]
            seconds = round(sum(o.pop("seconds") for o in outcomes), 1)
            row |= summed(outcomes) | {"judging": seconds, "outcomes": [o["shares"] for o in outcomes]}
            self.told["settings"].append(row)
            self.lab.write()
        self.waiting = self.waiting[most:] if most else []

    def text(self) -> str:
        heads = [*(name[:6] for name in MEASURES), "PSNR", "worst", "10 %", "median", ">=30"]
        lines = [f"{self.steps} steps".ljust(34) + f"{'computed':>9}" + "".join(f"{head:>8}" for head in heads)]
        exact: dict[str, Any] = {}
        for row in self.told["settings"]:
            right = row["right"]
            if not exact:
                exact = right
                cells = ["-" if right[name] is None else f"{right[name]:.1f}" for name in MEASURES]
            else:
                cells = ["-" if right[n] is None else f"{right[n] - exact[n]:+.1f}" for n in MEASURES]
                worst = row["worst_psnr"]
                cells += [f"{row['psnr']:.1f}", *(f"{worst[name]:.1f}" for name in ("least", "tenth", "median"))]
                cells.append(f"{100 * worst['share_30']:.0f} %")
            lines.append(f"{row['setting']:34}{100 * row['computed']:8.1f}%" + "".join(f"{cell:>8}" for cell in cells))
        return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--calibrate", type=int, default=4, help="clips to calibrate on")
    parser.add_argument("--steps", default="50,20")
    parser.add_argument("--frames", type=int, help="default: as the model was trained; fewer for a trial")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=125.0)
    parser.add_argument("--judging", type=float, default=6.0, help="seconds kept back for judging at the end")
    parser.add_argument("--device")
    parser.add_argument("--dtype")
    given = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the processes that judge
    with get_context("spawn").Pool(max((os.cpu_count() or 2) - 1, 1)) as pool:
        lab = Lab(given, pool)
        lab.say("loaded")
        tables: list[Table] = []
        for steps in map(int, given.steps.split(",")):
            if tables and lab.seconds + given.judging + 15 > given.seconds:
                lab.results["left_out"].append(f"everything at {steps} steps")
                continue
            tables.append(Table(lab, steps))
            tables[-1].run()
        for table in tables:
            table.caches([(spec, None) for spec in EXTRA])
        for table in tables:
            table.collect()
            print(table.text())
        if lab.results["left_out"]:
            print("left out for time: " + "; ".join(lab.results["left_out"]))
        lab.results["seconds"] = round(lab.seconds, 1)
        lab.write()
        lab.say("done")


if __name__ == "__main__":
    main()
