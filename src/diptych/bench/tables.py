"""Results of a benchmark as a table for people."""

from __future__ import annotations

from typing import Any


def forward_table(result: dict[str, Any]) -> str:
    """The lines of one `bench forward`."""
    lines = [
        f"{result['model']}, {result['blocks']} blocks, {result['geometry']}, {result['text_tokens']} text tokens, "
        f"{result['dtype']}, {result['machine']['device']}, torch {result['machine']['torch']}",
        "",
        f"{'':32}{'seconds':>10}{'peak GiB':>10}",
    ]
    for name, spent in result["seconds"].items():
        lines.append(f"{name:32}{spent:10.4f}{result['peak_bytes'][name] / 2**30:10.1f}")
    if "floor" in result:
        lines += ["", *(f"{name:32}{spent:10.4f}" for name, spent in result["floor"].items())]
        lines.append(f"{'measured / floor':32}{result['over_floor']:10.3f}")
    if "speedup" in result:
        for name, spent in result["seconds"].items():
            if name.startswith("diptych"):
                lines.append(f"{f'diffusers / {name}':36}{result['seconds']['diffusers'] / spent:6.2f}")
        lines.append(f"{'relative difference of velocity':32}{result['difference']:10.2e}")
    if "fp8_difference" in result:
        lines.append(f"{'relative difference of fp8':32}{result['fp8_difference']:10.2e}")
    if "profile" in result:
        lines += ["", f"on the device, {result['profile']['launches']} launches"]
        lines += [f"{name:32}{spent:10.4f}" for name, spent in result["profile"]["seconds"].items()]
        for kernel in result["profile"]["top"][:12]:
            lines.append(
                f"  {kernel['seconds']:9.4f} {kernel['launches']:6} {kernel['class']:13} {kernel['kernel'][:70]}"
            )
    return "\n".join(lines)


def seconds_table(result: dict[str, Any]) -> str:
    """Seconds of each part, and its peak memory where it was taken."""
    peaks = result.get("peak_bytes", {})
    lines = [f"{name}: {result[name]}" for name in ("model", "checkpoint", "geometry", "dtype") if result.get(name)]
    for name, spent in result["seconds"].items():
        peak = f"{peaks[name] / 2**30:10.1f} GiB" if peaks.get(name) else ""
        lines.append(f"{name:32}{spent:10.4f} s{peak}")
    if "speedup" in result:
        lines.append(f"{'diffusers / diptych':32}{result['speedup']:10.2f}")
    return "\n".join(lines)


def load_table(result: dict[str, Any]) -> str:
    """Every read with its rate."""
    lines = [f"{result['checkpoint']}: transformer of {result['bytes'] / 1e9:.2f} GB, {result['machine']['device']}"]
    for spent, rate in zip(result["seconds"], result["bytes_per_second"], strict=True):
        lines.append(f"{spent:10.3f} s {rate / 1e9:10.2f} GB/s")
    return "\n".join(lines)
