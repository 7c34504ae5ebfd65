"""Ranks for the tests of layouts."""

from ranks import ranks  # noqa: F401
