"""Fixtures that every test may use: two tiny checkpoints, written once a session."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

from ranks import end_ranks

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads only wait for each other
if not Path("/dev/nvidiactl").exists():  # read when triton is first imported, which diffusers does
    os.environ.setdefault("TRITON_INTERPRET", "1")

gc.disable()  # until all is imported: that stays, and looking through it for cycles took a fifth of the time


@pytest.fixture(scope="session")
def tiny_base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny base checkpoint (flow matching, float32). Read only: it is shared by all tests."""
    from diptych.model.tiny import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny") / "base")


@pytest.fixture(scope="session")
def tiny_distilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny distilled checkpoint (PiFlow, tenfold heads, float32). Read only: it is shared by all tests."""
    from diptych.model.tiny import write_tiny

    return write_tiny(tmp_path_factory.mktemp("tiny") / "distilled", distilled=True)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        end_ranks()


LONGEST = [
    "engine/test_spawned.py",
    "server/test_lifecycle.py",
    "caches/test_cache_ranks.py",
    "engine/test_layouts.py",
    "parallel/test_weights.py",
    "diffusers/test_diffusers_compile.py",
    "cli/test_generate.py",
    "toyworld/test_twin.py",
    "server/test_studio.py",
    "toyworld/test_demo.py",
    "pipeline/test_pipefusion.py",
    "memory/test_offload_engine.py",
    "attention/test_compile.py",
    "server/test_openai_client.py",
    "server/test_bad_input.py",
    "engine/test_parity.py",
    "planner/test_plan_command.py",
    "server/test_postgres.py",
    "parallel/test_documents.py",
    "toyworld/test_reading.py",
    "cli/test_score.py",
    "server/test_requests.py",
    "server/test_safety.py",
    "parallel/test_sequence.py",
    "caches/test_step_caches.py",
    "model/test_checkpoint.py",
    "kernels/test_hopper.py",
    "bench/test_multi_gpu.py",
    "toyworld/test_training.py",
    "diffusers/test_pipeline.py",
    "diffusers/test_pipefusion_models.py",
    "diffusers/test_two_t4.py",
    "diffusers/test_velocity.py",
    "server/test_content.py",
    "server/test_overhead.py",
    "pipeline/test_pipeline_clips.py",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long come first: begun last, one would keep a worker busy while the other has nothing left."""
    turns = {Path(__file__).parent / name: turn for turn, name in enumerate(LONGEST)}
    items.sort(key=lambda item: turns.get(item.path, len(turns)))
