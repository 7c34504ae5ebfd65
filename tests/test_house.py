"""The house keeps its own rules: what import-linter cannot say."""

from __future__ import annotations

import ast
import gc
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src" / "diptych").rglob("*.py"))


def imports(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("file", [f for f in SOURCES if "model" in f.parts], ids=lambda f: f.name)
def test_the_model_knows_no_ranks(file):
    assert not [name for name in imports(file) if name.startswith("torch.distributed")]


@pytest.mark.parametrize("file", [f for f in SOURCES if "attention" in f.parts], ids=lambda f: f.name)
def test_attention_needs_nothing_but_torch(file):
    allowed = ("torch", "diptych.attention", "diptych.errors", "triton", "fa3_fwd_interface", "flash_attn_interface")
    standard = ("__future__", "collections", "contextlib", "dataclasses", "enum", "functools", "importlib", "itertools")
    standard += ("math", "typing", "types", "warnings", "os")
    strange = [name for name in imports(file) if not name.startswith((*allowed, *standard))]
    assert not strange


@pytest.mark.parametrize("file", SOURCES, ids=lambda f: str(f.relative_to(ROOT / "src")))
def test_a_file_holds_one_idea(file):
    assert len(file.read_text().splitlines()) <= 400


def test_test_modules_have_names_of_their_own():
    """pytest imports them by their bare names, and so do the ranks that run their functions."""
    names = [f.name for f in (ROOT / "tests").rglob("*.py") if f.name not in ("conftest.py", "__init__.py")]
    assert sorted(set(names)) == sorted(names)


def test_importing_the_package_imports_nothing_heavy():
    import subprocess
    import sys

    code = "import sys, diptych, diptych.cli.main; print([m for m in ('torch', 'diffusers', 'av') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_garbage_is_looked_for_while_tests_run():
    """It is not while they are collected."""
    assert gc.isenabled()
