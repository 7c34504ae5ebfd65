"""Fixtures that every test may use: two tiny checkpoints, written once a session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads only wait for each other
if not Path("/dev/nvidiactl").exists():  # read when triton is first imported, which diffusers does
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base checkpoint (flow matching, float32). Read only: it is shared by all tests."""
    from diptych.model.tiny import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny") / "base")


@pytest.fixture(scope="session")
def tiny_distilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny distilled checkpoint (PiFlow, tenfold heads, float32). Read only: it is shared by all tests."""
    from diptych.model.tiny import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny") / "distilled", distilled=True)
