"""`NAME[:threshold,max_run,retention]`, or with names: which cache, how daring."""

from __future__ import annotations

import difflib
from dataclasses import fields
from typing import ClassVar, Protocol, cast

from diptych.errors import RequestError
from diptych.sampling.caches.base import Run, StepCache
from diptych.sampling.caches.cachedit import CacheDiTSettings
from diptych.sampling.caches.firstblock import FirstBlockSettings
from diptych.sampling.caches.magcache import MagCacheSettings
from diptych.sampling.caches.navicache import NaviCacheSettings
from diptych.sampling.caches.record import RecordSettings
from diptych.sampling.caches.taylor import TaylorSettings
from diptych.sampling.caches.teacache import TeaCacheSettings


class Settings(Protocol):
    """A frozen dataclass of one cache's values. needs: what of a calibration it cannot do without, or nothing."""

    name: ClassVar[str]
    needs: ClassVar[str]

    def start(self, run: Run) -> StepCache: ...


CACHES: dict[str, type[Settings]] = {
    settings.name: cast(type[Settings], settings)
    for settings in (
        MagCacheSettings,
        NaviCacheSettings,
        FirstBlockSettings,
        CacheDiTSettings,
        TaylorSettings,
        TeaCacheSettings,
        RecordSettings,
    )
}

_RANGES = {
    "threshold": (0.0, 10.0),
    "max_run": (0, 1000),
    "retention": (0.0, 1.0),
    "align": (1, 1000),
    "last": (0, 1000),
    "front": (1, 1000),
    "back": (0, 1000),
    "order": (0, 3),
}


def parse(text: str) -> Settings:
    """Read `magcache`, `magcache:0.12,2,0.2` or `navicache:0.05,align=8`; what is left out keeps its default.

    Raises `RequestError` for an unknown cache, name or value.
    """
    name, _, rest = (part.strip() for part in text.partition(":"))
    if name not in CACHES:
        close = difflib.get_close_matches(name, CACHES, n=1)
        hint = f"did you mean {close[0]}?" if close else "known are " + ", ".join(CACHES)
        raise RequestError("cache", text, f"no such cache; {hint}")
    kind = CACHES[name]
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    whole = {field.name for field in fields(kind) if field.type == "int"}  # type: ignore[arg-type]
    values: dict[str, float] = {}
    for place, part in enumerate(rest.split(",") if rest else []):
        given, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            if not given:
                continue
            if place >= len(known):
                raise RequestError("cache", text, f"{name} takes {_takes(known)}")
            given, value = known[place], given
        if given not in known:
            raise RequestError("cache", text, f"{name} has no {given}; it takes {_takes(known)}")
        if given in values:
            raise RequestError("cache", text, f"{given} once")
        values[given] = _number(name, given, value, given in whole)
    return kind(**values)


def describe(settings: Settings) -> str:
    """`settings` in full, as `parse` reads it."""
    values = ",".join(f"{f.name}={getattr(settings, f.name):g}" for f in fields(settings))  # type: ignore[arg-type]
    return f"{settings.name}:{values}" if values else settings.name


def _takes(known: list[str]) -> str:
    return ", ".join(known) if known else "no values"


def _number(cache: str, name: str, value: str, whole: bool) -> float:
    low, high = _RANGES[name]
    try:
        number = int(value) if whole else float(value)
    except ValueError:
        number = float("nan")
    if not low <= number <= high:
        kind = "a whole number" if whole else "a number"
        raise RequestError(f"cache {cache}: {name}", value, f"{kind} from {low:g} to {high:g}")
    return number
