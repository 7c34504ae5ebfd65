"""Floors, timings and comparisons."""
