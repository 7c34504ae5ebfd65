"""Attention kernels, roles, and unified sequence-parallel attention; needs nothing but torch.

Names are imported when first used, so that what only counts and plans starts without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diptych.attention.cache import PatchCache as PatchCache
    from diptych.attention.collectives import Traffic as Traffic
    from diptych.attention.joint import Joint as Joint
    from diptych.attention.kernels import APPROXIMATE as APPROXIMATE
    from diptych.attention.kernels import KERNELS as KERNELS
    from diptych.attention.kernels import NO_KEY as NO_KEY
    from diptych.attention.kernels import Kernel as Kernel
    from diptych.attention.kernels import KernelName as KernelName
    from diptych.attention.kernels import Need as Need
    from diptych.attention.kernels import pick as pick
    from diptych.attention.local import LocalAttend as LocalAttend
    from diptych.attention.place import Group as Group
    from diptych.attention.place import Place as Place
    from diptych.attention.plan import Plan as Plan
    from diptych.attention.plan import split as split
    from diptych.attention.roles import Attend as Attend
    from diptych.attention.roles import Role as Role
    from diptych.attention.unified import Attended as Attended
    from diptych.attention.unified import Exchange as Exchange
    from diptych.attention.unified import unified_attention as unified_attention
    from diptych.attention.volume import attention_bytes as attention_bytes
    from diptych.attention.volume import gather_bytes as gather_bytes
    from diptych.attention.volume import merge_bytes as merge_bytes

_HOMES = {
    "APPROXIMATE": "kernels",
    "KERNELS": "kernels",
    "NO_KEY": "kernels",
    "Attend": "roles",
    "Attended": "unified",
    "Exchange": "unified",
    "Group": "place",
    "Joint": "joint",
    "Kernel": "kernels",
    "KernelName": "kernels",
    "LocalAttend": "local",
    "Need": "kernels",
    "PatchCache": "cache",
    "Place": "place",
    "Plan": "plan",
    "Role": "roles",
    "Traffic": "collectives",
    "attention_bytes": "volume",
    "gather_bytes": "volume",
    "merge_bytes": "volume",
    "pick": "kernels",
    "split": "plan",
    "unified_attention": "unified",
}
__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
