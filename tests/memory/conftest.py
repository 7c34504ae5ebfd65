"""Ranks for the tests of offload."""

from ranks import ranks  # noqa: F401
