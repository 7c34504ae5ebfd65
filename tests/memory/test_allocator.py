"""The allocator's setting for engines with a limit; what it brings is measured by benchmarks/offload_run.py."""

from __future__ import annotations

import pytest
import torch

from diptych.memory import allocator


def test_torch_takes_the_setting() -> None:
    allocator.set_allocator(allocator.GROWING)
    with pytest.raises(ValueError, match="growing_segments"):
        allocator.set_allocator("growing_segments:True")


def test_it_is_for_gpus_and_leaves_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(allocator, "set_allocator", asked.append)
    for name in allocator.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    assert not allocator.grow_segments(torch.device("cpu"))
    assert not asked
    assert allocator.grow_segments(torch.device("cuda", 0))
    assert asked == ["expandable_segments:True"]
    for name in allocator.VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(name, "expandable_segments:False,max_split_size_mb:64")
            assert not allocator.grow_segments(torch.device("cuda", 0))
    assert len(asked) == 1
