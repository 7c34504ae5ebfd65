"""Attention kernels, roles, and unified sequence-parallel attention; needs nothing but torch."""
