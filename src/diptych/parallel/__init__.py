"""Layouts, meshes, and who holds which tokens.

Names are imported when first used, so that a layout can be weighed without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diptych.parallel.guidance import CONDITIONAL as CONDITIONAL
    from diptych.parallel.guidance import UNCONDITIONAL as UNCONDITIONAL
    from diptych.parallel.guidance import GuidancePair as GuidancePair
    from diptych.parallel.guidance import guided as guided
    from diptych.parallel.layout import MESH_DIMS as MESH_DIMS
    from diptych.parallel.layout import Layout as Layout
    from diptych.parallel.sequence import SequenceAttend as SequenceAttend
    from diptych.parallel.sequence import TokenShard as TokenShard

_HOMES = {
    "CONDITIONAL": "guidance",
    "MESH_DIMS": "layout",
    "UNCONDITIONAL": "guidance",
    "GuidancePair": "guidance",
    "Layout": "layout",
    "SequenceAttend": "sequence",
    "TokenShard": "sequence",
    "guided": "guidance",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
