"""The machine that is planned for: so many cards of one kind, given by name or found here, and what joins them."""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

from diptych.errors import MissingError, RequestError
from diptych.memory.footprint import GIB
from diptych.planner.cards import Card, card_named, card_shown

MAX_GPUS = 16
"""In one host; several hosts are planned one at a time."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`count` cards of one kind in one host.

    link: bytes a second that a rank sends to others at best, if it is known better than by the card; host_memory:
    bytes, None where it is not known; found: whether this machine was looked at, or was described.
    """

    card: Card
    count: int
    link: float | None = None
    host_memory: int | None = None
    found: bool = False

    def __str__(self) -> str:
        return f"{self.count}x{self.card.name}"


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine as nvidia-smi shows it: memory in bytes, capability as CUDA counts it."""

    name: str
    memory: int
    driver: str
    capability: tuple[int, int]


def machine_of(text: str, *, link: float | None = None) -> Machine:
    """The machine called `8xH100-80` (or `H200`, which is one). link: GB/s that a rank sends at.

    Raises `RequestError` for a card that is not known or a count that cannot be.
    """
    match = re.fullmatch(r"\s*(?:(\d{1,6})\s*[x×*])?\s*([\w .-]+?)\s*", text)
    if match is None:
        raise RequestError("gpus", text, "a count and a card, such as 8xH100-80")
    card, count = card_named(match[2]), int(match[1] or 1)
    if not 1 <= count <= MAX_GPUS:
        raise RequestError("gpus", text, f"1 to {MAX_GPUS} cards of one kind, as one host has")
    return Machine(card=card, count=count, link=None if link is None else link * 1e9)


def gpus_here() -> list[Gpu]:
    """The GPUs of this machine by nvidia-smi, those that CUDA_VISIBLE_DEVICES hides left out; none without it."""
    fields = "index,uuid,name,memory.total,driver_version,compute_cap"
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return read_smi(done.stdout, os.environ.get("CUDA_VISIBLE_DEVICES"))


def read_smi(text: str, visible: str | None) -> list[Gpu]:
    """The GPUs that nvidia-smi lists as index, uuid, name, MiB, driver, capability, as far as they are visible."""
    found = {}
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) != 6 or not parts[3].isdecimal() or not re.fullmatch(r"\d+\.\d+", parts[5]):
            continue
        index, uuid, name, memory, driver, capability = parts
        major, minor = capability.split(".")
        found[index] = found[uuid] = Gpu(name, int(memory) << 20, driver, (int(major), int(minor)))
    if visible is None:
        return [gpu for key, gpu in found.items() if key.isdecimal()]
    shown = []
    for part in visible.split(","):  # CUDA stops at the first that it does not know
        gpu = found.get(part.strip()) or next((g for key, g in found.items() if part and key.startswith(part)), None)
        if gpu is None:
            break
        shown.append(gpu)
    return shown


def machine_here(gpus: list[Gpu] | None = None, *, link: float | None = None) -> Machine:
    """This machine. Raises `RequestError` when no GPU is found, or they are of several kinds or an unknown one."""
    gpus = gpus_here() if gpus is None else gpus
    if not gpus:
        raise MissingError("gpus", "no NVIDIA GPU is found here; say which to plan for, such as --gpus 1x4090")
    names = {gpu.name for gpu in gpus}
    if len(names) > 1:
        hint = "several kinds are planned one at a time; name one kind, such as --gpus 2x4090"
        raise RequestError("gpus", ", ".join(sorted(names)), hint)
    card = card_shown(gpus[0].name)
    if card is None:
        raise RequestError("gpus", gpus[0].name, "not in the table; name the nearest card, such as --gpus 1xa100-80")
    card = replace(card, memory=min(gpu.memory for gpu in gpus) / GIB, capability=gpus[0].capability)
    speed = None if link is None else link * 1e9
    return Machine(card=card, count=len(gpus), link=speed, host_memory=host_memory(), found=True)


def host_memory() -> int | None:
    """Bytes of this host's memory, or of what its container may use if that is less."""
    try:
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            text = Path(path).read_text().strip()
        except OSError:
            continue
        if text.isdecimal():
            whole = min(whole, int(text))
    return whole
