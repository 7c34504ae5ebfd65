"""Modulation tables: the same numbers as in the step, and weights that a step never touches."""

from __future__ import annotations

import pytest
import torch

from diptych.attention import LocalAttend
from diptych.bench.geometry import Geometry, random_inputs, random_transformer
from diptych.memory.tables import ModulationTables, park
from diptych.model.config import TINY
from diptych.model.layers import Modulation
from diptych.model.transformer import Modulations
from diptych.sampling.denoiser import Denoiser
from diptych.sampling.latents import Latents

CPU = torch.device("cpu")
SIZE = Geometry.parse("64x32x9")
TIMES = torch.tensor([1000.0, 617.25, 3.5])


@pytest.fixture
def model():
    return random_transformer(TINY, CPU, torch.float32)


def flat(m: Modulations) -> list[torch.Tensor]:
    blocks = [part for block in m.blocks for part in block if part is not None]
    return [*m.text_video, *m.text_audio, *blocks, m.head_video, *([] if m.head_audio is None else [m.head_audio])]


@pytest.mark.parametrize("audio", [True, False], ids=["sound", "silent"])
@torch.no_grad()
def test_a_table_holds_what_each_step_would_compute(model, audio):
    contexts = []
    for seed in (1, 2):
        draw = torch.Generator().manual_seed(seed)
        text, pooled = torch.randn(2, 5, TINY.in_text_dim, generator=draw), torch.randn(2, 24, generator=draw)
        contexts.append(model.context(text, pooled, None))
    tables = ModulationTables(park(model), TIMES, contexts, audio=audio)
    for timestep in TIMES:
        for context in contexts:
            want = flat(model.modulations(timestep.expand(2), context, audio=audio))
            have = flat(tables.at(timestep, context))
            assert len(have) == len(want)
            assert all(torch.equal(a, b) for a, b in zip(have, want, strict=True))


@torch.no_grad()
def test_no_step_touches_the_weights(model):
    inputs = random_inputs(TINY, SIZE, 5, CPU, torch.float32)
    context = model.context(inputs.text, inputs.pooled, None)
    grid = model.grid(*SIZE.latents, SIZE.audio_tokens, tail=False, device=CPU)
    latents = Latents(inputs.video[..., :16], inputs.audio)
    want = Denoiser(model, LocalAttend(), grid, [context], 1.0).velocity(latents, TIMES[1])
    tables = ModulationTables(model, TIMES, [context], audio=True)
    for module in model.modules():
        if isinstance(module, Modulation):
            module.to("meta")
    have = Denoiser(model, LocalAttend(), grid, [context], 1.0, tables=tables).velocity(latents, TIMES[1])
    assert torch.equal(have.video, want.video)
    assert torch.equal(have.audio, want.audio)
