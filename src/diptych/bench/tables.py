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
        lines.append(f"{'diffusers / diptych':32}{result['speedup']:10.2f}")
        lines.append(f"{'relative difference of velocity':32}{result['difference']:10.2e}")
    if "profile" in result:
        lines += ["", f"on the device, {result['profile']['launches']} launches"]
        lines += [f"{name:32}{spent:10.4f}" for name, spent in result["profile"]["seconds"].items()]
        for kernel in result["profile"]["top"][:12]:
            lines.append(
                f"  {kernel['seconds']:9.4f} {kernel['launches']:6} {kernel['class']:13} {kernel['kernel'][:70]}"
            )
    return "\n".join(lines)
