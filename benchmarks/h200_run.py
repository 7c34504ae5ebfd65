"""One run on an H200: kernels against their twins, tiles, forwards and decodes, in one run.

    python benchmarks/h200_run.py OUT_FOLDER [section ...] [--tiny] [--ours]

Each section is tried on its own, so that one failure does not lose the rest; results go to OUT_FOLDER/results.json
after every section. `--tiny` runs at toy sizes on whatever is there, `--ours` leaves out what is known already.
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import h200_kernels
import h200_models
from diptych.bench.forward import machine
from h200_common import DEVICE, TINY

RESULTS: dict[str, Any] = {}
SECTIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "fp8_parts": h200_kernels.fp8_parts,
    "pro": lambda: h200_models.precisions("tiny" if TINY else "pro", 1),
    "lite": lambda: h200_models.precisions("tiny" if TINY else "lite", 2),
    "decode": h200_models.decode_whole,
    "new_text_length": h200_kernels.new_text_length,
    "cross": h200_kernels.cross,
    "fused": h200_kernels.fused,
    "exactness": h200_models.exactness,
    "compiled": h200_models.compiled,
}


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
    RESULTS["machine"] = machine(DEVICE)
    for name in asked:
        start = time.perf_counter()
        try:
            RESULTS[name] = SECTIONS[name]()
        except Exception:
            RESULTS[name] = {"failed": traceback.format_exc()[-1500:]}
        gc.collect()
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
        RESULTS[name]["section seconds"] = time.perf_counter() - start
        (out / "results.json").write_text(json.dumps(RESULTS, indent=1, default=str))
        print(f"== {name}: {RESULTS[name]['section seconds']:.1f} s", flush=True)
        for key, value in RESULTS[name].items():
            text = str(short(value))
            print(f"  {key}: {text[: 1500 if key in ('failed', 'profile') else 400]}", flush=True)


if __name__ == "__main__":
    main()
