"""Clips as files: MP4 in and out, contact sheets, thumbnails."""
