"""The kernels compile for a Hopper GPU, on any machine, into the instructions they were written for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton.backends.nvidia")


def test_every_kernel_compiles_for_hopper(tmp_path):
    script = Path(__file__).with_name("hopper.py")
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    run = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-2000:]
    for name, made in json.loads(run.stdout).items():
        assert made["wide loads"] > 0, f"{name} reads less than 16 bytes at a time"
        assert made["spilled"] == 0, f"{name} spills {made['spilled']} bytes of registers"
        assert made["serialised"] == 0, f"{name} waits for each of its matrix instructions"
        if name == "convolution" or name.startswith("bounded"):
            assert made["matrix instructions"] > 0, f"{name} runs on the tensor cores of another age"
