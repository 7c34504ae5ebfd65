"""Attention kernels, roles, and unified sequence-parallel attention; needs nothing but torch."""

from diptych.attention.cache import PatchCache
from diptych.attention.collectives import Traffic
from diptych.attention.joint import Joint
from diptych.attention.kernels import KERNELS, NO_KEY, Kernel, KernelName, Need, pick
from diptych.attention.local import LocalAttend
from diptych.attention.place import Group, Place
from diptych.attention.plan import Plan, split
from diptych.attention.roles import Attend, Role
from diptych.attention.unified import Attended, Exchange, unified_attention
from diptych.attention.volume import attention_bytes, gather_bytes, merge_bytes

__all__ = [
    "KERNELS",
    "NO_KEY",
    "Attend",
    "Attended",
    "Exchange",
    "Group",
    "Joint",
    "Kernel",
    "KernelName",
    "LocalAttend",
    "Need",
    "PatchCache",
    "Place",
    "Plan",
    "Role",
    "Traffic",
    "attention_bytes",
    "gather_bytes",
    "merge_bytes",
    "pick",
    "split",
    "unified_attention",
]
