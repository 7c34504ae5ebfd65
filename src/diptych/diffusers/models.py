"""The model classes that can be split."""

from __future__ import annotations

from typing import Any

from diffusers import FluxTransformer2DModel, HunyuanVideoTransformer3DModel, Kandinsky6Transformer3DModel

from diptych.diffusers.flux import FluxSeams
from diptych.diffusers.hunyuan_video import HunyuanVideoSeams
from diptych.diffusers.kandinsky6 import Kandinsky6Seams
from diptych.diffusers.seams import Seams

MODELS: dict[type[Any], type[Seams]] = {
    Kandinsky6Transformer3DModel: Kandinsky6Seams,
    FluxTransformer2DModel: FluxSeams,
    HunyuanVideoTransformer3DModel: HunyuanVideoSeams,
}
"""By class: how it is split."""
