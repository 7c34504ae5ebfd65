"""docs/parallel.md tells what the code does: its example runs, its volumes are those that are computed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diptych.attention import KERNELS, Group, Place, Plan, attention_bytes, merge_bytes
from diptych.model.config import LITE, PRO, TransformerConfig
from diptych.parallel import Layout

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "parallel.md").read_text()
ROW = re.compile(r"^\| (\d) \| `([a-z=0-9,]+)` \| (.*) \|$", re.MULTILINE)
TOKENS, AUDIO = 51_840, 225


def megabytes(layout: Layout, config: TransformerConfig) -> tuple[str, str]:
    """Self-attention and merge, of the rank that sends most."""
    R, U = layout.ring, layout.ulysses
    places = [
        Place(Group("r", R, r), Group("u", U, u), Group("s", R * U, r * U + u)) for r in range(R) for u in range(U)
    ]
    sizes = {"heads": config.heads, "kv_heads": config.heads, "head_dim": config.head_dim, "itemsize": 2}
    most = max(attention_bytes(Plan.even(place, TOKENS), **sizes) for place in places)
    merged = merge_bytes(R * U, queries=AUDIO, heads=config.heads_a, head_dim=config.head_dim, itemsize=2)
    return f"{most / 1e6:.0f}", f"{merged / 1e6:.1f}"


def test_the_volumes_are_those_computed() -> None:
    rows = ROW.findall(PAGE)
    assert len(rows) == 9
    for ranks, text, cells in rows:
        layout = Layout.parse(text)
        assert layout.world == int(ranks)
        assert tuple(cells.split(" | ")) == megabytes(layout, PRO) + megabytes(layout, LITE)


def test_every_kernel_is_listed() -> None:
    for kernel in KERNELS:
        assert f"| `{kernel.name}` |" in PAGE


@pytest.mark.distributed
def test_the_example_runs_on_two_ranks() -> None:
    script = str(DOCS / "examples" / "unified_attention.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
        try:
            stdout, stderr = process.communicate(timeout=120)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 0, stderr
    told = re.findall(r"rank (\d): tokens (\d+) to (\d+), off by 0e\+00", stdout)  # lines of two ranks may run together
    assert sorted(told) == [("0", "0", "501"), ("1", "501", "1001")]
