"""Adds what a benchmark measured to the settings that the planner is held against, and says how far it is off.

    python benchmarks/measured_settings.py RESULT.json CARD [--dry]

RESULT.json: what offload_run.py, h200_run.py, simulate_layouts.py, multi_gpu.py or `diptych bench forward` wrote, or
several of them under their names, kept under benchmarks/results; CARD: as `diptych plan --gpus` names it, such as h200.
Settings that are listed already from this file are replaced. Afterwards docs/planning.md is written anew. `--dry` only
prints.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools import planning_document

from diptych.memory.footprint import GIB
from diptych.planner.cards import card_named

Row = dict[str, Any]
COMMON: Row = {"text": 200, "layout": "single", "precision": "exact", "modulation": "tables", "offload": "none"}


def of_offload(result: dict[str, Any]) -> Iterator[tuple[str, Row]]:
    """Forwards and decodes under caps: (where in the file, setting)."""
    base = COMMON | {"geometry": result["geometry"]}
    for section, model, precision in (("lite", "lite", "exact"), ("pro", "pro", "exact"), ("fp8", "pro", "fp8")):
        for label, told in _rows(result.get(section)):
            row = base | {"what": "forward", "model": model, "precision": precision} | _taken(told)
            if "resident blocks" in told:
                row["offload"] = label.partition(",")[0]
                row |= {"resident": told["resident blocks"], "chunks": told["chunks"]}
            elif "with modulation" in label:
                row["modulation"] = "resident"
            yield f"{section}, {label}", row
    for label, told in _rows(result.get("decode")):
        budget = int(float(label.split()[1]) * GIB * 0.97)
        yield (
            f"decode, {label}",
            base | {"what": "decode", "model": "pro", "modulation": "resident", "decode_budget": budget} | _taken(told),
        )


def of_h200_run(result: dict[str, Any]) -> Iterator[tuple[str, Row]]:
    """Forwards, decodes, and clips of distilled models."""
    base = COMMON | {"geometry": "864x480x125", "modulation": "resident"}
    for model in ("pro", "lite"):
        tables = {"modulation": "tables"} if "parked in" in result.get(model, {}) else {}
        for label, precision in (("bf16", "exact"), ("fp8 products and attention", "fp8")):
            told = result.get(model, {}).get(label)
            if isinstance(told, dict) and told.get("seconds"):
                found = {"seconds": statistics.median(told["seconds"]), "peak_gib": told["peak GiB"]}
                row = base | tables | {"what": "forward", "model": model, "precision": precision}
                yield f"{model}, {label}", row | found
    told = result.get("decode", {})
    if "diptych" in told:
        found = {"seconds": told["diptych"], "peak_gib": told["diptych peak GiB"]}
        yield "decode", base | {"what": "decode", "model": "pro"} | found
    if "within 6 GiB, peak GiB" in told:
        found = {"seconds": told["within 6 GiB"][1], "peak_gib": told["within 6 GiB, peak GiB"]}
        yield "decode within 6 GiB", base | {"what": "decode", "model": "pro", "decode_budget": 6 * GIB} | found
    for section, model in (("clip", "pro-distill"), ("clip_lite", "lite-distill")):
        told = result.get(section, {})
        if "clip s" in told:
            found = {"precision": told["precision"], "seconds": told["clip s"], "peak_gib": None}
            yield section, base | {"what": "clip", "model": model} | found


def of_multi_gpu(result: dict[str, Any]) -> Iterator[tuple[str, Row]]:
    """Steps and whole clips under layouts."""
    base = COMMON | {"geometry": "864x480x125", "modulation": "resident"}
    for ranks, world in result["worlds"].items():
        for model in ("pro", "lite", "pro-distill"):
            for label, told in world.get(model, {}).items():
                parts = label.split(", ")
                kind, layout = parts[-2:] if len(parts) > 1 else ("", "")
                if kind not in ("bf16", "fp8") or not isinstance(told, dict):
                    continue
                row = base | {"model": model, "layout": layout, "precision": "exact" if kind == "bf16" else "fp8"}
                if parts[0] == "clip" and "clip s" in told:
                    found = {"what": "clip", "seconds": told["clip s"], "peak_gib": None}
                elif "step s" in told:
                    found = {"what": "step", "seconds": told["step s"], "peak_gib": told.get("peak GiB") or None}
                else:
                    continue
                yield f"{ranks} ranks, {model}, {label}", row | found


def of_simulate(result: dict[str, Any]) -> Iterator[tuple[str, Row]]:
    """Forwards of one rank of a layout, played on one card."""
    base = COMMON | {"geometry": result["geometry"], "modulation": "resident", "blocks": result["blocks"]}
    for told in result["layouts"]:
        row = base | {"what": "rank", "model": result["model"], "layout": told["layout"]}
        yield told["layout"], row | {"seconds": told["forward"], "peak_gib": None}


def of_forward(result: dict[str, Any]) -> Iterator[tuple[str, Row]]:
    """`diptych bench forward`: exact, and in the precision that was asked for."""
    base = COMMON | {"geometry": result["geometry"], "text": result["text_tokens"], "modulation": "resident"}
    for name, precision in (("diptych", "exact"), ("diptych fp8", "fp8")):
        if name in result["seconds"]:
            found = {"seconds": result["seconds"][name], "peak_gib": result["peak_bytes"][name] / GIB}
            yield name, base | {"what": "forward", "model": result["model"], "precision": precision} | found


def settings(result: dict[str, Any]) -> Iterator[tuple[str, Row]]:
    """All settings of a file: (where in it, setting)."""
    kinds = {"offload": of_offload, "h200_run": of_h200_run, "simulate": of_simulate, "multi_gpu": of_multi_gpu}
    # Played ranks that were kept among other results had computed on tensors that nobody had written.
    parts = {name: result[name] for name in kinds if name != "simulate" and isinstance(result.get(name), dict)}
    if not parts:
        marks = {"worlds": "multi_gpu", "host": "offload", "layouts": "simulate", "peak_bytes": "forward"}
        name = next((kind for mark, kind in marks.items() if mark in result), "h200_run")
        yield from (kinds | {"forward": of_forward})[name](result)
    for name, part in parts.items():
        yield from ((f"{name}, {where}", row) for where, row in kinds[name](part))


def _rows(section: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    if isinstance(section, dict):
        yield from ((label, told) for label, told in section.items() if isinstance(told, dict) and "first" in told)


def _taken(told: dict[str, Any]) -> Row:
    return {"seconds": told["seconds"], "peak_gib": told.get("allocated GiB")}


def main() -> None:
    file, card = Path(sys.argv[1]), card_named(sys.argv[2], "CARD")
    result = json.loads(file.read_text())
    found = list(settings(result))
    rows = [{"card": card.name, **row, "source": f"{file.name}, {where}"} for where, row in found]
    for row in rows:
        seconds, held = planning_document.predicted(row)
        memory = (
            "" if row["peak_gib"] is None else f"{row['peak_gib']:8.2f} GiB {held / GIB / row['peak_gib'] - 1:+7.1%}"
        )
        where = row["source"].partition(", ")[2]
        print(f"{where:52}{row['seconds']:9.3f} s {seconds / row['seconds'] - 1:+7.1%}{memory}")
    if "--dry" in sys.argv:
        return
    listed = json.loads(planning_document.MEASURED.read_text())
    kept = [row for row in listed["settings"] if row["source"].partition(", ")[0] != file.name]
    lines = ",\n".join("  " + json.dumps(row) for row in kept + rows)
    about = json.dumps(listed["about"])
    planning_document.MEASURED.write_text(f'{{\n "about": {about},\n "settings": [\n{lines}\n ]\n}}\n')
    planning_document.main()
    print(f"{len(rows)} settings from {file.name} are listed")


if __name__ == "__main__":
    main()
