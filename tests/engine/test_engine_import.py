"""Importing the engine brings in no stock models and no FSDP: they take seconds, and come with what needs them."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import diptych.engine.engine
late = {"diffusers", "transformers", "torch._dynamo", "torch.distributed.fsdp", "av", "fastapi"}
print(sorted(late & set(sys.modules)))
"""


def test_the_engine_imports_nothing_that_only_some_clips_need():
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
