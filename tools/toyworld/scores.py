"""Scores of several checkpoints on the same prompts and seeds, side by side; kept in one file that grows."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.bench.score import MEASURES, Score
from diptych.errors import RequestError
from diptych.media.files import replacing
from diptych.model.checkpoint import Checkpoint
from diptych.sampling.schedules import schedule_for
from tools.toyworld.judging import Parts, judge_many, judges
from tools.toyworld.training import device

Counts = dict[str, dict[str, float]]
"""Of each measure, how much is right, of how many clips."""


@dataclass(frozen=True)
class Run:
    """A checkpoint folder (or `demo`), its steps and guidance; written `FOLDER`, `FOLDER@STEPS` or
    `FOLDER@STEPS@GUIDANCE`, with the checkpoint's own values where none are given."""

    checkpoint: Checkpoint
    steps: int
    guidance: float

    @classmethod
    def parse(cls, text: str) -> Run:
        folder, *given = text.split("@")
        checkpoint = Checkpoint.open(folder)
        own = checkpoint.defaults
        try:
            steps, guidance = (*given, *(str(own.steps), str(own.guidance))[len(given) :])
            run = cls(checkpoint, int(steps), float(guidance))
        except ValueError:
            raise RequestError("run", text, "FOLDER, FOLDER@STEPS or FOLDER@STEPS@GUIDANCE, with numbers") from None
        assert run.guidance == 1.0 or not checkpoint.distilled, "a distilled checkpoint has guidance built in"
        return run

    @property
    def name(self) -> str:
        return f"{self.checkpoint.root.name}, {self.steps} steps, guidance {self.guidance:g}"

    @property
    def forwards(self) -> int:
        """Of the transformer, for one clip."""
        return self.steps * (1 if self.guidance == 1.0 else 2)

    def weights(self) -> str:
        """What tells two trainings of one checkpoint apart."""
        with (self.checkpoint.root / "transformer" / "diffusion_pytorch_model.safetensors").open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()


def counts(score: Score) -> Counts:
    """`right` is a sum of shares: of a clip's bounces some may be right."""
    clips = {name: score.count(name) for name in MEASURES}
    return {name: {"right": round(score.share(name) * n, 6) if n else 0.0, "clips": n} for name, n in clips.items()}


def together(seeds: dict[str, Any]) -> Counts:
    """Sums over seeds."""
    return {n: {k: sum(s["measures"][n][k] for s in seeds.values()) for k in ("right", "clips")} for n in MEASURES}


def scores(file: Path, runs: list[str], prompts: int = 64, seeds: int = 3) -> str:
    """Judge `prompts` held-out prompts with seeds 0 .. seeds - 1 of every run; returns a table of all in `file`.

    It is written after every seed, and what it already holds of the same weights and prompts is not made again.
    """
    place = device()
    kept = json.loads(file.read_text()) if file.exists() else {"prompts": prompts, "runs": {}}
    assert kept["prompts"] == prompts, f"{file} holds scores of {kept['prompts']} prompts"
    chosen = [Run.parse(text) for text in runs]
    assert len({run.name for run in chosen}) == len(chosen), "runs are told apart by the names of their folders"
    with judges(prompts) as readers:
        for run in chosen:
            same = {"steps": run.steps, "guidance": run.guidance, "forwards": run.forwards, "weights": run.weights()}
            entry = kept["runs"].get(run.name, {})
            if any(entry.get(name) != value for name, value in same.items()):
                entry = kept["runs"][run.name] = same | {"seeds": {}}
            wanted = [seed for seed in range(seeds) if str(seed) not in entry["seeds"]]
            parts = Parts.open(run.checkpoint.root, place) if wanted else None
            schedule = schedule_for(run.checkpoint.scheduler, run.steps, "diffusers")
            for seed in wanted:
                assert parts is not None
                started = time.monotonic()
                found = judge_many(
                    parts, run.checkpoint.root, prompts, schedule, readers, guidance=run.guidance, seed=seed
                )
                clips = [{"prompt": v.prompt, "scene": v.scene.key, "shares": v.shares} for v in found.verdicts]
                entry["seeds"][str(seed)] = {"measures": counts(found), "verdicts": clips}
                entry["measures"] = together(entry["seeds"])
                _write(file, kept)
                print(
                    f"{run.name}, seed {seed}: {100 * found.total:.1f} %, {time.monotonic() - started:.1f} s",
                    flush=True,
                )
    return table(kept)


def table(kept: dict[str, Any]) -> str:
    """A column a run, in Markdown."""
    runs = {name: run for name, run in kept["runs"].items() if run["seeds"]}
    goals = {name: goal for name, (_, goal) in MEASURES.items()}
    lines = [f"| measure | {' | '.join(runs)} | goal |", "|---" * (len(runs) + 2) + "|"]
    for name, (text, goal) in MEASURES.items():
        cells = [f"{_percent(run['measures'][name])} of {run['measures'][name]['clips']}" for run in runs.values()]
        lines.append(f"| {text} | {' | '.join(cells)} | {f'{100 * goal:.0f} %' if goal else 'none'} |")
    means = []
    for run in runs.values():
        told = [m for name, m in run["measures"].items() if goals[name] and m["clips"]]
        means.append(f"{100 * sum(m['right'] / m['clips'] for m in told) / len(told):.1f} %")
    lines.append(f"| mean of those with a goal | {' | '.join(means)} | |")
    lines.append(f"| seeds | {' | '.join(str(len(run['seeds'])) for run in runs.values())} | |")
    lines.append(f"| forwards a clip | {' | '.join(str(run['forwards']) for run in runs.values())} | |")
    return "\n".join(lines)


def _percent(measure: dict[str, float]) -> str:
    return f"{100 * measure['right'] / measure['clips']:.1f} %" if measure["clips"] else "-"


def _write(file: Path, kept: dict[str, Any]) -> None:
    """At once or not at all: a run that is cut off leaves what was there."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with replacing(file) as part:
        part.write_text(json.dumps(kept, indent=1) + "\n")
