"""Engine: load a checkpoint, hold the ranks, generate."""
