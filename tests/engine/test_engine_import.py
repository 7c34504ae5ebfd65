"""Importing the engine brings in no stock models: they take seconds, and are loaded with the weights they belong to."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
import diptych.engine.engine
print(sorted({"diffusers", "transformers", "torch._dynamo", "av", "fastapi"} & set(sys.modules)))
"""


def test_the_engine_imports_no_stock_models():
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
