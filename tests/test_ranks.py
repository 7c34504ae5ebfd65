"""The pool of ranks: kept while a file of tests uses it, gone when that is over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ranks import end_ranks, ranks  # noqa: F401 - the fixture

pytestmark = pytest.mark.distributed


def test_ranks_stay_until_they_are_ended_and_come_again(ranks):  # noqa: F811
    first = ranks(2)(os.getpid)
    assert ranks(2)(os.getpid) == first
    end_ranks()
    assert not any(Path(f"/proc/{pid}").exists() for pid in first)
    assert not set(ranks(2)(os.getpid)) & set(first)
