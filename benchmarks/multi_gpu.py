"""Kandinsky 6 on the GPUs of one host: are the links right, how fast is a step under each layout, how long a clip?

    python benchmarks/multi_gpu.py OUT.json [--models pro,lite,pro-distill] [--budget 300] [--worlds 1,2] [--quick]

Worlds of 1, 2, 4 and 8 ranks, as many as there are GPUs; one rank first, which the others are held against. Random
weights, 864x480, 125 frames. Ranks are processes started here; OUT.json is written anew after every measurement. A
section that fails or hangs is told with its traceback, and new ranks go on with the section after it. `--quick` is the
same on the CPU with gloo ranks and the tiny model: it shows that everything runs, and no speed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

RANKS = Path(__file__).with_name("multi_gpu_ranks.py")
SHARE = {1: 95.0, 2: 195.0, 4: 120.0, 8: 80.0}
"""How the budget is dealt to the worlds, as expected for H200s; what one leaves goes to those after it."""
SILENCE = 100.0
"""Seconds without any new result after which ranks are taken for hung."""


@dataclass
class World:
    """The ranks of one size: started, watched, started again with what is left when they fail.

    silence: seconds without a result after which they are taken for hung; margin: seconds they are to end early.
    """

    ranks: int
    sections: list[str]
    folder: Path
    command: list[str]
    silence: float = SILENCE
    margin: float = 5.0
    results: dict[str, Any] = field(default_factory=dict)

    def run(self, seconds: float, tell: Any) -> dict[str, Any]:
        """Results by section, after at most `seconds`; `tell` is called whenever there are new ones."""
        until = time.monotonic() + seconds
        while self.sections and time.monotonic() < until - self.margin:
            why = self._attempt(until, tell)
            finished = [name for name in self.sections if self.results.get(name, {}).get("state") == "done"]
            left = [name for name in self.sections if name not in finished]
            if not left or why is None:
                break
            stopped = self.results.setdefault(left[0], {})
            stopped["state"], stopped["failed"] = "failed", why
            self.sections = left[1:]
            tell()
        for name in self.sections:
            if name not in self.results:
                self.results[name] = {"state": "not begun", "failed": "no time left"}
        return self.results

    def _attempt(self, until: float, tell: Any) -> str | None:
        """Run the sections that are left; what stopped the ranks, or None when they came to the end."""
        port = _free_port()
        for old in self.folder.glob(f"failed-{self.ranks}-*"):
            old.unlink()
        file = self.folder / f"world-{self.ranks}.json"
        file.unlink(missing_ok=True)
        environment = os.environ | {"WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        environment.setdefault("NCCL_NVLS_ENABLE", "0")
        given = ["--sections", ",".join(self.sections), "--seconds", f"{until - time.monotonic() - self.margin:.1f}"]
        started = [
            subprocess.Popen(
                [*self.command, *given],
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                start_new_session=True,
            )
            for rank in range(self.ranks)
        ]
        seen, heard = 0.0, time.monotonic()
        try:
            while True:
                time.sleep(0.2)
                changed = file.stat().st_mtime if file.exists() else 0.0
                if changed != seen:
                    seen, heard = changed, time.monotonic()
                    self.results |= json.loads(file.read_text())
                    tell()
                codes = [process.poll() for process in started]
                if any(codes):
                    time.sleep(1.0)  # the others may have something to tell too
                    return self._failures() or f"a rank ended with status {next(code for code in codes if code)}"
                if all(code == 0 for code in codes):
                    if file.exists():
                        self.results |= json.loads(file.read_text())
                    return None
                if time.monotonic() - heard > self.silence:
                    return f"no result for {self.silence:.0f} s: taken for hung"
                if time.monotonic() > until:
                    return "its time was up"
        finally:
            for process in started:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def _failures(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.folder.glob(f"failed-{self.ranks}-*.txt")))


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def table(result: dict[str, Any]) -> str:
    """What was measured: a line a layout, with the speed-up over one rank of the same run, and the prediction."""
    worlds = result["worlds"]
    link = _link(result)
    lines = [
        f"{'model':12}{'':24}{'step s':>9}{'x one':>7}{'predicted':>10}{'busy':>7}{'GiB':>6}{'error':>9}{'alike':>6}"
    ]
    models = [name for name in ("pro", "lite", "pro-distill") if any(name in world for world in worlds.values())]
    for model in models:
        one = worlds.get("1", {}).get(model, {})
        for world in worlds.values():
            for label, row in world.get(model, {}).items():
                if not isinstance(row, dict) or "step s" not in row:
                    continue
                precision, _, layout = label.partition(", ")
                alone = one.get(f"{precision}, single", {}).get("step s")
                gain = f"{alone / row['step s']:7.2f}" if alone else f"{'':7}"
                busy = f"{row['all busy']:7.1%}" if "all busy" in row else f"{'':7}"
                error = f"{row['error'][0]:9.1e}" if isinstance(row.get("error"), list) else f"{'':9}"
                alike = {True: "yes", False: "NO"}.get(row.get("alike on all ranks"), "")
                ahead = _predicted(one, precision, layout, link)
                peak = f"{row['peak GiB']:6.1f}"
                lines.append(f"{model:12}{label:24}{row['step s']:9.3f}{gain}{ahead}{busy}{peak}{error}{alike:>6}")
            for label, row in world.get(model, {}).items():
                if label.startswith("clip") and isinstance(row, dict) and "clip s" in row:
                    parts = f"denoise {row['denoise s']:.1f}, decode and sound {row['decode and sound s']:.2f}"
                    lines.append(f"{model:12}{label}: {row['clip s']:.2f} s ({parts})")
                if label.startswith("yardstick"):
                    lines.append(f"{model:12}bf16, {label}, one rank: {row[0]:.1e}")
    for ranks, world in worlds.items():
        for name, found in world.get("links", {}).items():
            if name not in ("state", "section seconds"):
                lines.append(f"{ranks} ranks, {name}: {_short(found)}")
        if "decode" in world:
            told = {name: value for name, value in world["decode"].items() if name not in ("state", "section seconds")}
            lines.append(f"{ranks} ranks, decode: {_short(told)}")
        for name, found in world.items():
            if "failed" in found:
                lines.append(f"{ranks} ranks, {name} FAILED: {found['failed'].strip()[-400:]}")
            for label, row in found.items():
                if isinstance(row, dict) and "skipped" in row:
                    lines.append(f"{ranks} ranks, {name}, {label}: left out, {row['skipped']}")
                for key in ("failed", "tracing failed"):
                    if isinstance(row, dict) and key in row:
                        lines.append(f"{ranks} ranks, {name}, {label}, {key}: {row[key].strip()[-300:]}")
    return "\n".join(lines)


def _link(result: dict[str, Any]) -> float | None:
    """Bytes a second that a rank sends in an exchange of heads, the slowest of the worlds."""
    rates = [
        row["q, k, v to heads"]["GB/s a rank"] * 1e9
        for world in result["worlds"].values()
        for name, row in world.get("links", {}).items()
        if name.endswith("a block")
    ]
    return min(rates) if rates else None


def _predicted(one: dict[str, Any], precision: str, layout: str, link: float | None) -> str:
    if precision == "bf16" and layout == "cfg=2" and "bf16, single" in one:
        return f"{one['bf16, single']['forward s']:10.3f}"  # one lane each; the velocities that travel are small
    row = one.get(f"simulated, {layout}")
    if precision != "bf16" or link is None or not isinstance(row, dict) or "compute_step" not in row:
        return f"{'':10}"
    return f"{row['compute_step'] + row['bytes_per_step'] / link:10.3f}"


def _short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: _short(inner) for key, inner in value.items()}
    return value


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("out", type=Path)
    options.add_argument("--models", default="pro,lite,pro-distill")
    options.add_argument("--budget", type=float, default=300.0, help="seconds in all")
    options.add_argument("--worlds", help="such as 1,2; default: 1, 2, 4, 8 as far as there are GPUs")
    options.add_argument("--quick", action="store_true")
    given = options.parse_args()
    begun = time.monotonic()
    if given.worlds:
        worlds = [int(text) for text in given.worlds.split(",")]
    else:
        most = 4 if given.quick else _gpus()
        worlds = [ranks for ranks in (1, 2, 4, 8) if ranks <= most]
    result: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "command": sys.argv[1:]}
    result |= {"environment": {k: v for k, v in os.environ.items() if k.startswith(("NCCL_", "TORCH_", "NVSHMEM_"))}}
    result["worlds"] = {}

    def write() -> None:
        result["seconds"] = time.monotonic() - begun
        new = given.out.with_suffix(".new")
        new.write_text(json.dumps(result, indent=1))
        new.rename(given.out)

    given.out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="multi-gpu-") as folder:
        for index, ranks in enumerate(worlds):
            left = given.budget - (time.monotonic() - begun)
            weights = [SHARE.get(other, 100.0) for other in worlds[index:]]
            sections = [*(["links"] if ranks > 1 else []), *given.models.split(","), "decode"]
            command = [sys.executable, str(RANKS), folder, "--models", given.models]
            command += ["--worlds", ",".join(map(str, worlds[index + 1 :]))] + ["--quick"] * given.quick
            world = World(ranks, sections, Path(folder), command)
            result["worlds"][str(ranks)] = world.results
            world.run(left * weights[0] / sum(weights), write)
            write()
            print(f"{ranks} ranks: {time.monotonic() - begun:.0f} s", flush=True)
    print(table(result))


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


if __name__ == "__main__":
    main()
