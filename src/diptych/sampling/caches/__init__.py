"""Step caches: forwards that are predicted from earlier ones instead of computed. All are approximations, by name."""

from diptych.sampling.caches.base import StepCache
from diptych.sampling.caches.plan import CachePlan
from diptych.sampling.caches.spec import CACHES, Settings, parse

__all__ = ["CACHES", "CachePlan", "Settings", "StepCache", "parse"]
