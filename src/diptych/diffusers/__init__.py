"""The drop-in for stock diffusers models: sequence parallelism with one import.

    import diptych.diffusers
    pipe.transformer.enable_parallelism(config=ContextParallelConfig(ulysses_degree=2))

Importing it gives the classes of `MODELS` an `enable_parallelism` of ours for context parallelism; every other class,
and tensor parallelism, stay as diffusers has them. For inference: nothing here has a gradient.
"""

from diptych.diffusers.models import MODELS
from diptych.diffusers.setup import adopt, disable, parallelize

for _cls in MODELS:
    adopt(_cls)

__all__ = ["MODELS", "disable", "parallelize"]
