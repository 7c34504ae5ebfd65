"""A fused block holds no tensor of the stream's size longer than it needs it."""

from __future__ import annotations

import gc

import pytest
import torch

from diptych.attention import LocalAttend
from diptych.bench.geometry import Geometry, random_inputs, random_transformer
from diptych.model.blocks import FusedBlock
from diptych.model.config import TINY

CPU = torch.device("cpu")
SIZE = Geometry.parse("160x96x9")


@pytest.mark.parametrize("sound", [True, False], ids=["sound", "silent"])
@torch.no_grad()
def test_only_the_stream_and_its_normed_form_live_in_the_feed_forward(sound):
    model = random_transformer(TINY, CPU, torch.float32)
    inputs = random_inputs(TINY, SIZE, 5, CPU, torch.float32)
    context = model.context(inputs.text, inputs.pooled, None)
    grid = model.grid(*SIZE.latents, SIZE.audio_tokens if sound else 0, tail=False, device=CPU)
    modulations = model.modulations(inputs.timestep, context, audio=sound)
    audio = inputs.audio if sound else None
    streams = model.embed(inputs.video, audio, context, grid, modulations, LocalAttend())
    alive: list[int] = []

    def count(module, args):
        gc.collect()
        shape = streams.video.shape
        storages = {
            x.untyped_storage().data_ptr()
            for x in gc.get_objects()
            if isinstance(x, torch.Tensor) and not isinstance(x, torch.nn.Parameter) and x.shape == shape
        }
        alive.append(len(storages))

    block: FusedBlock = model.fused_blocks[0]
    block.video_dec_block.feed_forward.register_forward_pre_hook(count)
    model.blocks(streams, LocalAttend(), 0, 1)
    assert alive == [3], "what entered the block, the stream with its residuals, and its normed form"
