"""One server with a fake engine for all tests that leave it as they find it, and one with the tiny checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2 as httpx
import pytest
from tests.server.serving import Serving

REAL = "diptych.engine.engine:Engine.load"


@pytest.fixture(scope="session")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A server with the fake engine, shared."""
    with Serving(tmp_path_factory.mktemp("served") / "state", "--max-queue", "64") as serving:
        yield serving


@pytest.fixture
def api(served: Serving) -> Iterator[httpx.Client]:
    with served.client as client:
        yield client


@pytest.fixture(scope="session")
def tiny_served(tmp_path_factory: pytest.TempPathFactory, tiny_base: Path) -> Iterator[Serving]:
    """A server with the real engine and the tiny checkpoint, shared."""
    state = tmp_path_factory.mktemp("tiny-served") / "state"
    flags = ("--device", "cpu", "--dtype", "float32", "--served-model-name", "tiny", "--cache", "taylor")
    with Serving(state, *flags, checkpoint=str(tiny_base), engine=REAL, HF_HUB_OFFLINE="1") as serving:
        yield serving
