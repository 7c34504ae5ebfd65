"""Layouts, meshes, and who holds which tokens."""

from diptych.parallel.guidance import CONDITIONAL, UNCONDITIONAL, GuidancePair, guided
from diptych.parallel.layout import MESH_DIMS, Layout
from diptych.parallel.sequence import SequenceAttend, TokenShard

__all__ = [
    "CONDITIONAL",
    "MESH_DIMS",
    "UNCONDITIONAL",
    "GuidancePair",
    "Layout",
    "SequenceAttend",
    "TokenShard",
    "guided",
]
