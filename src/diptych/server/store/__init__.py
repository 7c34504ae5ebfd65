"""Jobs and their files: what survives a kill."""
