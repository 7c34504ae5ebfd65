"""Ranks that may take their time for the first answer: they import diffusers, transformers and PEFT before it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from ranks import ranks as gloo_ranks  # noqa: F401 - the fixture


@pytest.fixture(scope="session")
def ranks(gloo_ranks: Callable[[int], Callable[..., list[Any]]]) -> Callable[[int], Callable[..., list[Any]]]:  # noqa: F811
    return lambda world: partial(gloo_ranks(world), seconds=240)
