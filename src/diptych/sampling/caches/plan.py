"""A cache chosen for a checkpoint: settled before anything runs, sent to every rank, made anew for each request."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diptych.errors import RequestError
from diptych.model.checkpoint import Checkpoint
from diptych.model.config import PRO
from diptych.parallel.agreement import Agreement
from diptych.request import ResolvedRequest
from diptych.sampling.caches.base import Known, Run, StepCache
from diptych.sampling.caches.cachedit import CacheDiTSettings
from diptych.sampling.caches.calibration import Calibration, published
from diptych.sampling.caches.spec import Settings, describe, parse
from diptych.sampling.caches.taylor import TaylorSettings

_NEEDS = {"ratios": "ratios", "polynomial": "a polynomial"}


@dataclass(frozen=True)
class CachePlan:
    """settings: of the cache; calibrations: where what it needs may be found, the best first; name: the checkpoint."""

    settings: Settings
    calibrations: tuple[Calibration, ...]
    name: str

    @classmethod
    def of(cls, text: str, checkpoint: Checkpoint) -> CachePlan:
        """Raises `RequestError` for a cache that does not exist or cannot run here, or a distilled checkpoint."""
        settings = parse(text)
        if checkpoint.distilled:
            raise RequestError(
                "cache", text, "a distilled checkpoint takes few steps, each far from the last, and caches none of them"
            )
        if isinstance(settings, CacheDiTSettings):
            settings.check(checkpoint.transformer.num_visual_blocks)
        found = Calibration.find(checkpoint.fingerprint) if settings.needs else None
        calibrations = [] if found is None else [found]
        if checkpoint.transformer == PRO:
            calibrations.append(published())
        return cls(settings, tuple(calibrations), checkpoint.name)

    @property
    def kept(self) -> int:
        """Tensors of the video stream's size that are held for each lane: two residuals at most, or their series."""
        match self.settings:
            case TaylorSettings(order=order):
                return order + 1
            case CacheDiTSettings(order=order) if order:
                return 2 * order + 3
        return 2

    def check(self, resolved: ResolvedRequest) -> None:
        """Raise `RequestError` where this cache would have to know what was never calibrated."""
        self._known(resolved)

    def start(self, resolved: ResolvedRequest, agreement: Agreement) -> StepCache:
        """The cache of one request. All ranks start theirs together."""
        lanes = 1 + resolved.guided
        return self.settings.start(Run(lanes, resolved.steps, agreement, self._known(resolved)))

    def describe(self, resolved: ResolvedRequest) -> dict[str, Any]:
        """What the report tells of the choice."""
        known = self._known(resolved)
        return {"name": describe(self.settings)} | ({"calibration": known.source} if known.source else {})

    def _known(self, resolved: ResolvedRequest) -> Known:
        needs = self.settings.needs
        if not needs:
            return Known()
        for calibration in self.calibrations:
            known = calibration.known(resolved)
            if known is not None and getattr(known, needs):
                return known
        mode = "i2va" if resolved.request.image is not None else "t2va"
        raise RequestError(
            "cache",
            self.settings.name,
            f"it needs {_NEEDS[needs]} measured on this checkpoint for {mode}; run diptych calibrate {self.name}"
            + (" --image PICTURE" if mode == "i2va" else "")
            + ", or take navicache, firstblock or taylor",
        )
