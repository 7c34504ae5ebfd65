"""Noise, schedules, guidance, and the denoise loop."""
