"""The drop-in for stock diffusers models: sequence parallelism with one import."""
