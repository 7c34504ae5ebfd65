"""Attention kernels, roles, and unified sequence-parallel attention; needs nothing but torch."""

from diptych.attention.kernels import KERNELS, NO_KEY, Kernel, KernelName, Need, pick
from diptych.attention.local import LocalAttend
from diptych.attention.roles import Attend, Role

__all__ = ["KERNELS", "NO_KEY", "Attend", "Kernel", "KernelName", "LocalAttend", "Need", "Role", "pick"]
