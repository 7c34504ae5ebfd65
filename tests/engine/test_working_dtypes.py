"""What has to run in float32 does, whatever the working dtype, the precision and the way modulations are made."""

from __future__ import annotations

import pytest
import torch

from diptych.engine.engine import Engine
from diptych.model.blocks import FusedBlock
from diptych.model.layers import TimeEmbeddings
from diptych.model.tiny import write_tiny
from diptych.request import ClipRequest
from diptych.sampling.schedules import FlowSchedule, PiFlowSchedule

REQUEST = ClipRequest("a red ball", width=32, height=32, frames=5, steps=2, seed=7)
OPTIONS = {
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "bfloat16, tables": {"dtype": "bfloat16", "modulation": "tables"},
    "bfloat16, fp8": {"dtype": "bfloat16", "precision": "fp8"},
}


@pytest.fixture(scope="module", params=[False, True], ids=["base", "distilled"])
def released(request, tmp_path_factory):
    """Stored as the published files are: a distilled one holds its modulations in bfloat16."""
    folder = tmp_path_factory.mktemp("released") / "tiny"
    return write_tiny(folder, distilled=request.param, dtypes="released")


@pytest.fixture
def seen(monkeypatch):
    """What time decides on its way through a clip, in the order it is met: of any dtype that it happens to have."""
    met: dict[str, list[torch.Tensor]] = {"times": [], "time vectors": [], "modulations": [], "latents": []}
    block, time = FusedBlock.forward, TimeEmbeddings.forward

    def in_block(self, *args):
        met["modulations"] += [part for part in args[4] if part is not None]
        return block(self, *args)

    def in_time(self, timestep):
        met["times"].append(timestep)
        met["time vectors"].append(time(self, timestep))
        return met["time vectors"][-1]

    monkeypatch.setattr(FusedBlock, "forward", in_block)
    monkeypatch.setattr(TimeEmbeddings, "forward", in_time)
    for schedule in (FlowSchedule, PiFlowSchedule):

        def in_step(self, index, x, velocity, step=schedule.step):
            met["latents"] += [x, step(self, index, x, velocity)]
            return met["latents"][-1]

        monkeypatch.setattr(schedule, "step", in_step)
    return met


def met_by(seen, folder, **options):
    for values in seen.values():
        values.clear()
    with Engine.load(folder, device="cpu", **options) as engine:
        engine.generate(REQUEST)
    return {name: list(values) for name, values in seen.items()}


def test_time_and_modulation_are_those_of_a_float32_run_bit_for_bit(released, seen):
    want = met_by(seen, released)
    for name, options in OPTIONS.items():
        have = met_by(seen, released, **options)
        for what in want:
            assert want[what]
            assert {x.dtype for x in have[what]} == {torch.float32}, (name, what)
        for what in ("times", "time vectors", "modulations"):
            assert len(have[what]) == len(want[what]), (name, what)
        for a, b in zip(want["modulations"], have["modulations"], strict=True):
            assert torch.equal(a, b), name
        assert sorted(map(sum_of, have["time vectors"])) == sorted(map(sum_of, want["time vectors"])), name
        assert torch.equal(have["latents"][0], want["latents"][0]), "the noise is the same in every dtype"


def sum_of(x: torch.Tensor) -> float:
    return float(x.double().sum())
