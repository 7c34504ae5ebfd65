"""The stock diffusers pipeline on the tiny checkpoint: the oracle of every codec."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def pipeline(tiny_base):
    from diffusers import Kandinsky6TI2VAPipeline

    pipeline = Kandinsky6TI2VAPipeline.from_pretrained(tiny_base, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
