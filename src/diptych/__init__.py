"""Kandinsky 6 clips with synchronised sound: one clip computed by all GPUs at once, exactly.

`Engine.load(...)`, `engine.generate(ClipRequest(...))`, `clip.save(path)`. Names are imported when first used, so that
`import diptych` costs nothing.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diptych.engine.engine import Engine as Engine
    from diptych.errors import Cancelled as Cancelled
    from diptych.errors import UserError as UserError
    from diptych.media.clip import Clip as Clip
    from diptych.model.checkpoint import Checkpoint as Checkpoint
    from diptych.parallel.layout import Layout as Layout
    from diptych.request import ClipRequest as ClipRequest

__version__ = "0.1.0"

# Where bitsandbytes is installed, diffusers imports it, and on some CPUs it warns of a kernel that is not used here.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

_HOMES = {
    "Cancelled": "diptych.errors",
    "Checkpoint": "diptych.model.checkpoint",
    "Clip": "diptych.media.clip",
    "ClipRequest": "diptych.request",
    "Engine": "diptych.engine.engine",
    "Layout": "diptych.parallel.layout",
    "UserError": "diptych.errors",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'diptych' has no attribute {name!r}")
