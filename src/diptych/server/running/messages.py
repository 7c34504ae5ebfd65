"""What an engine process and its runner say to each other: typed, over one pipe, each about one job."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """Make one clip for each seed into `folder`. `request` holds the fields of `ClipRequest` without seed and image.

    `cache`: the step cache of this job; None computes every forward, whatever the engine was loaded with.
    """

    job: str
    request: dict[str, Any]
    seeds: tuple[int, ...]
    image: Path | None
    folder: Path
    crf: int
    preset: str
    preview_every: int
    cache: str | None = None


@dataclass(frozen=True)
class Cancel:
    job: str


@dataclass(frozen=True)
class Loading:
    """A sign of life while the checkpoint loads or warms up."""

    what: str


@dataclass(frozen=True)
class Ready:
    """Loaded and warm. `defaults`: the fields of `ClipDefaults`; `about`: what else the API tells of this engine."""

    defaults: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Unloadable:
    """The engine cannot be loaded, for a reason that a user can mend."""

    reason: str


@dataclass(frozen=True)
class Step:
    """`done` of `total` units of `stage` for output `output`; `preview` is a JPEG of how it looks now."""

    job: str
    output: int
    stage: str
    done: int
    total: int
    seconds: float
    left: float | None
    preview: bytes | None = None


@dataclass(frozen=True)
class Finished:
    """All outputs lie checked in the folder; `result` is what result.json says."""

    job: str
    result: dict[str, Any]


@dataclass(frozen=True)
class Stopped:
    """Cancelled at a step boundary; the engine is free."""

    job: str


@dataclass(frozen=True)
class Failed:
    """`code` and `message` go to the client; after a `fatal` fault the process ends and a new one is loaded."""

    job: str
    code: str
    message: str
    fatal: bool
