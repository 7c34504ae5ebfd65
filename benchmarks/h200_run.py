"""One run on an H200: kernels against their twins, tiles, forwards and decodes, in one run.

    python benchmarks/h200_run.py OUT_FOLDER [section ...] [--tiny] [--ours] [--seconds=N]

Each section is tried on its own, so that one failure does not lose the rest; results go to OUT_FOLDER/results.json
after every section. `--tiny` runs at toy sizes on whatever is there, `--ours` leaves out what is known already,
`--seconds=N` leaves out the sections that would not end before.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import h200_attention
import h200_clips
import h200_codecs
import h200_finish
import h200_kernels
import h200_models
from diptych.bench.forward import machine
from h200_common import DEVICE, OURS, TINY, free, tried

BEGUN = time.perf_counter()
RESULTS: dict[str, Any] = {}
SECTIONS: dict[str, tuple[Callable[[], dict[str, Any]], float]] = {
    "fp8_parts": (h200_kernels.fp8_parts, 14),
    "pro": (lambda: h200_models.precisions("pro", 1), 75 if OURS else 145),
    "lite": (lambda: h200_models.precisions("lite", 2), 25 if OURS else 50),
    "decode": (h200_models.decode_whole, 22 if OURS else 50),
    "finish": (h200_finish.finish, 40),
    "start": (h200_clips.start, 18 if OURS else 35),
    "clip": (lambda: h200_clips.clip("pro-distill", "fp8"), 75),
    "clip_lite": (lambda: h200_clips.clip("lite-distill", "exact"), 30),
    "load": (h200_clips.load, 40),
    "new_text_length": (h200_kernels.new_text_length, 5),
    "cross": (h200_kernels.cross, 10),
    "short": (h200_kernels.short, 15),
    "fused": (h200_kernels.fused, 10),
    "merge": (h200_kernels.merge, 10),
    "bounded": (h200_attention.bounded, 25),
    "power": (h200_attention.power, 20),
    "tf32": (h200_codecs.tf32, 25),
    "exactness": (h200_models.exactness, 20),
    "compiled": (h200_models.compiled, 30),
}
"""What to run, and the seconds that it is expected to take on an H200."""


def short(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, dict):
        return {key: short(inner) for key, inner in value.items()}
    return [short(inner) for inner in value] if isinstance(value, list) else value


@torch.no_grad()
def main() -> None:
    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    asked = [name for name in sys.argv[2:] if name in SECTIONS] or list(SECTIONS)
    given = [text.partition("=")[2] for text in sys.argv if text.startswith("--seconds=")]
    until = BEGUN + float(given[0]) if given else float("inf")
    RESULTS["machine"] = machine(DEVICE)
    for name in asked:
        section, expected = SECTIONS[name]
        start = time.perf_counter()
        if not TINY and start + expected > until:
            RESULTS[name] = {"left out": f"{until - start:.0f} s left, about {expected:.0f} needed"}
        else:
            RESULTS[name] = tried(section)
        free()
        RESULTS[name]["section seconds"] = time.perf_counter() - start
        (out / "results.json").write_text(json.dumps(RESULTS, indent=1, default=str))
        print(f"== {name}: {RESULTS[name]['section seconds']:.1f} s", flush=True)
        for key, value in RESULTS[name].items():
            text = str(short(value))
            print(f"  {key}: {text[: 1500 if key in ('failed', 'profile') else 400]}", flush=True)


if __name__ == "__main__":
    main()
