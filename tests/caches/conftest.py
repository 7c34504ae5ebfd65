"""Ranks, and a tiny checkpoint on which the caches were calibrated."""

from __future__ import annotations

import pytest
from caches_work import SIZE

from diptych.bench.calibrate import calibrate
from diptych.engine.engine import Engine
from diptych.request import ClipRequest
from ranks import ranks  # noqa: F401


@pytest.fixture(scope="session")
def cache_home(tmp_path_factory):
    """The user's cache of this session's tests."""
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("cache")
    patch.setenv("XDG_CACHE_HOME", str(folder))
    yield folder
    patch.undo()


@pytest.fixture(scope="session")
def engine(tiny_base, cache_home):
    with Engine.load(tiny_base, device="cpu") as engine:
        calibrate(engine, ClipRequest("x", **SIZE), ["a red circle", "waves"])
        yield engine
