"""`layout="auto"` asks the planner about the GPUs that torch sees; on a CPU it is one rank."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from diptych import ClipRequest, Engine
from diptych.engine import auto
from diptych.errors import LayoutError
from diptych.memory.precision import EXACT
from diptych.model.checkpoint import Checkpoint
from diptych.parallel.layout import Layout
from diptych.planner.choices import Limits

GPU = torch.device("cuda", 0)
KEPT = Limits(precision=EXACT, modulation="resident")


@pytest.fixture
def see(monkeypatch):
    """Let torch see so many H200s, each with so many GiB."""

    def some(count, gib=140):
        here = SimpleNamespace(name="NVIDIA H200", total_memory=gib << 30, major=9, minor=0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: here)

    return some


def test_a_cpu_makes_the_clip_on_one_rank(tiny_base):
    request = ClipRequest("a red circle", width=64, height=48, frames=5, steps=2, seed=1, audio=False)
    with Engine.load(tiny_base, layout="auto", device="cpu") as engine:
        assert engine.generate(request).report["layout"] == "single"


def test_the_gpus_that_are_seen_are_planned_for(tiny_base, see):
    checkpoint = Checkpoint.open(tiny_base)
    for count in (1, 2):
        see(count)
        chosen = auto.chosen_layout(checkpoint, GPU, None, KEPT)
        assert chosen.world <= count
        assert auto.chosen_layout(checkpoint, GPU, count, KEPT).world == count  # torchrun's ranks all get work
    assert len(auto.gpus_of(GPU)) == 2
    assert len(auto.gpus_of(torch.device("cuda", 1))) == 1
    assert auto.gpus_of(torch.device("cpu")) == []


def test_weights_stay_on_the_card_unless_memory_or_offload_say_otherwise(tiny_base, see):
    """As the engine itself takes it: without a budget nothing is offloaded."""
    see(1, gib=1)
    checkpoint = Checkpoint.open(tiny_base)
    with pytest.raises(LayoutError, match="layout auto finds none for 1xh200: single needs"):
        auto.chosen_layout(checkpoint, GPU, None, KEPT)


def test_auto_is_no_name_of_an_axis():
    assert auto.given_layout(" auto ") is None
    assert auto.given_layout(None) == Layout()
    assert auto.given_layout("cfg=2") == Layout(cfg=2)
    with pytest.raises(LayoutError, match="layout 3 is not accepted"):
        auto.given_layout(3)


def test_ranks_of_torchrun_must_agree():
    with pytest.raises(LayoutError, match=r"layout cfg=2 has 2 ranks, and torchrun started 4; make them agree\.$"):
        auto.check_ranks(Layout(cfg=2), torch.device("cpu"), 4)
