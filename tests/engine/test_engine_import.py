"""Importing the engine brings in no stock models and no FSDP: they take seconds, and come with what needs them. A rank
imports at its start, and collects garbage only after that."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

from diptych.engine import rank_process, ranks

CODE = """
import sys
import diptych.engine.engine
late = {"diffusers", "transformers", "torch._dynamo", "torch.distributed.fsdp", "av", "fastapi"}
print(sorted(late & set(sys.modules)))
"""


def test_the_engine_imports_nothing_that_only_some_clips_need():
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"


def test_a_rank_looks_for_garbage_once_it_has_imported(monkeypatch):
    on: list[bool] = []
    monkeypatch.setattr(ranks, "rank_main", lambda pipe, lifeline: on.append(gc.isenabled()))
    monkeypatch.setattr(sys, "argv", ["rank_process", *map(str, os.pipe())])
    rank_process.main()
    assert on == [True]
