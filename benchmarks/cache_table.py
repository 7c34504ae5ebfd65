"""The tables of docs/caches.md from what benchmarks/cache_quality.py measured.

python benchmarks/cache_table.py benchmarks/results/cache_quality.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

NAMES = {"color": "colour", "background": "background", "motion": "motion", "shape": "shape", "pitch": "pitch"}
NAMES |= {"bounce": "bounce", "sound": "sound"}
DISTANCES = ("PSNR", "worst frame", "worst frame of the median clip", "clips without a frame below 30 dB")


def table(told: dict[str, Any]) -> list[str]:
    """Markdown of one number of steps: the exact clips' shares in percent, then points of difference from them."""
    exact, *rows = told["settings"]
    names = [name for name in NAMES if exact["right"][name] is not None]
    shares = [f"{exact['right'][name]:.1f}" for name in names]
    head = ["setting", "computed", *(NAMES[name] for name in names), *DISTANCES]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    lines.append("| exact, % | 100 % | " + " | ".join(shares) + " | | | | |")
    first = [row for row in rows if row["sought"] is not None]
    order = sorted(first, key=lambda row: (_name(row), -row["computed"]))
    for row in [*order, *(row for row in rows if row["sought"] is None)]:
        points = [f"{row['right'][name] - exact['right'][name]:+.1f}" for name in names]
        worst = row["worst_psnr"]
        far = [
            f"{row['psnr']:.1f}",
            f"{worst['least']:.1f}",
            f"{worst['median']:.1f}",
            f"{100 * worst['share_30']:.0f} %",
        ]
        name = row["setting"] if "exact" in row["setting"] else f"`{row['setting']}`"
        lines.append(f"| {name} | {100 * row['computed']:.0f} % | " + " | ".join(points + far) + " |")
    return lines


def _name(row: dict[str, Any]) -> tuple[bool, str]:
    return "exact" in row["setting"], row["setting"].partition(":")[0]


if __name__ == "__main__":
    for steps, told in json.loads(Path(sys.argv[1]).read_text())["tables"].items():
        print(f"\n{steps} steps, guidance {told['guidance']:g}:\n")
        print("\n".join(table(told)))
