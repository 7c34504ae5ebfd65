"""`benchmarks/multi_gpu.py`: what it measures on gloo ranks, and that a failing rank takes nothing along."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")
sys.path.insert(0, BENCHMARKS)

import multi_gpu  # noqa: E402
import multi_gpu_links  # noqa: E402
import multi_gpu_ranks  # noqa: E402


def bench(folder: Path, group: Any = None, worlds: tuple[int, ...] = ()) -> multi_gpu_ranks.Bench:
    rank, world = (0, 1) if group is None else (dist.get_rank(), dist.get_world_size())
    until = time.monotonic() + 60
    return multi_gpu_ranks.Bench(rank, world, torch.device("cpu"), group, True, folder, until, worlds)


def measure(folder: Path, names: list[str]) -> dict[str, Any]:
    return multi_gpu_ranks.run(bench(folder, dist.group.WORLD), names, multi_gpu_ranks.MODELS)


def wrong_sum(folder: Path) -> str:
    right = dist.all_reduce
    dist.all_reduce = lambda x, *args, **kwargs: right(x.mul_(2) if x.numel() > 1 else x, *args, **kwargs)
    try:
        multi_gpu_links.all_reduce(bench(folder, dist.group.WORLD), 64)
    except AssertionError as error:
        return str(error)
    finally:
        dist.all_reduce = right
    return ""


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> Path:
    """What one rank leaves for the others: its velocities, and what it predicts for them."""
    folder = tmp_path_factory.mktemp("ranks")
    multi_gpu_ranks.run(bench(folder, worlds=(4,)), ["lite"], multi_gpu_ranks.MODELS)
    return folder


def test_four_ranks_measure_every_layout_and_agree_with_one(ranks, one):
    multi = ranks(4)(measure, one, ["links", "lite"])[0]
    assert multi["links"]["all-reduce"]["right"]
    assert multi["links"]["tiny: a block"]["q, k, v to heads"]["GB/s a rank"] > 0
    alone = json.loads((one / "world-1.json").read_text())
    yardstick = alone["lite"]["yardstick: sdpa-math"]
    layouts = ["ulysses=4", "cfg=2,ulysses=2", "ring=2,ulysses=2", "ring=4"]
    assert [name for name in multi["lite"] if name.startswith("bf16")] == [f"bf16, {layout}" for layout in layouts]
    for layout in layouts:
        row = multi["lite"][f"bf16, {layout}"]
        assert row["alike on all ranks"]
        # A guided velocity is 5 of the one less 4 of the other, and so are its errors.
        assert max(row["error"]) < (9 if "cfg" in layout else 2) * max(yardstick), layout
        assert 0 < row["all busy"] < 1
        assert f"fp8, {layout}" in multi["lite"]
    told = multi_gpu.table({"worlds": {"1": alone, "4": multi}})
    line = next(line for line in told.splitlines() if "bf16, ring=2,ulysses=2" in line)
    row, simulated = multi["lite"]["bf16, ring=2,ulysses=2"], alone["lite"]["simulated, ring=2,ulysses=2"]
    link = multi["links"]["tiny: a block"]["q, k, v to heads"]["GB/s a rank"] * 1e9
    predicted = simulated["compute_step"] + simulated["bytes_per_step"] / link
    gain = alone["lite"]["bf16, single"]["step s"] / row["step s"]
    assert [f"{row['step s']:.3f}", f"{gain:.2f}", f"{predicted:.3f}"] == line.split()[3:6]


def test_a_distilled_model_makes_a_clip(ranks, tmp_path):
    multi_gpu_ranks.run(bench(tmp_path), ["decode"], multi_gpu_ranks.MODELS)
    both = ranks(2)(measure, tmp_path, ["pro-distill", "decode"])[0]
    assert both["decode"]["values that differ"] == 0
    found = both["pro-distill"]
    clip = found["clip, fp8, ulysses=2"]
    assert len(clip["steps s"]) == 2
    assert clip["clip s"] == pytest.approx(clip["denoise s"] + clip["decode and sound s"])
    assert not any("cfg" in name for name in found), "a distilled model has no guidance"
    assert "nothing to compare with" in found["bf16, ulysses=2"]["error"]


def test_a_wrong_sum_is_found(ranks, tmp_path):
    assert all("sums are not 3.0" in told for told in ranks(2)(wrong_sum, tmp_path))


def test_what_no_time_is_left_for_is_told(tmp_path):
    late = bench(tmp_path)
    late.quick, late.until, late.section = False, time.monotonic() + 5, "pro"
    assert late.room("short", 1.0)
    assert not late.room("long", 30.0)
    assert "about 30 needed" in json.loads((tmp_path / "world-1.json").read_text())["pro"]["long"]["skipped"]


PROGRAM = """
import json, os, sys, time
folder, sections = sys.argv[1], sys.argv[sys.argv.index("--sections") + 1].split(",")
rank, results, world = int(os.environ["RANK"]), {}, f"{folder}/world-2.json"
for name in sections:
    results[name] = {"state": "running"}
    if rank == 0:
        open(world, "w").write(json.dumps(results))
    if name == "fails" and rank == 1:
        while not os.path.exists(world) or name not in open(world).read():  # ranks begin a section together
            time.sleep(0.01)
        open(f"{folder}/failed-2-1.txt", "w").write("ValueError: of rank 1")
        os._exit(1)
    if name in ("fails", "hangs"):
        time.sleep(60)
    results[name] = {"state": "done"}
if rank == 0:
    open(world, "w").write(json.dumps(results))
"""


def test_ranks_that_fail_or_hang_cost_one_section(tmp_path):
    told = []
    command = [sys.executable, "-S", "-c", PROGRAM, str(tmp_path)]
    world = multi_gpu.World(2, ["good", "fails", "hangs", "last"], tmp_path, command, silence=5.0)
    start = time.monotonic()
    found = world.run(60.0, lambda: told.append(json.dumps(world.results)))
    assert time.monotonic() - start < 40  # its sleeping ranks were not waited for
    assert {name: section["state"] for name, section in found.items()} == {
        "good": "done",
        "fails": "failed",
        "hangs": "failed",
        "last": "done",
    }
    assert "of rank 1" in found["fails"]["failed"]
    assert "hung" in found["hangs"]["failed"]
    assert any('"fails": {"state": "running"}' in text for text in told), "results are told while they come"


def test_time_that_is_up_is_told_and_nothing_is_left_running(tmp_path):
    command = [sys.executable, "-S", "-c", PROGRAM, str(tmp_path)]
    world = multi_gpu.World(2, ["hangs", "last"], tmp_path, command, margin=0.2)
    found = world.run(1.0, lambda: None)
    assert found["hangs"]["failed"] == "its time was up"
    assert found["last"]["failed"] == "no time left"
