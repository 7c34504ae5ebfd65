"""Layouts, meshes, and who holds which tokens."""
