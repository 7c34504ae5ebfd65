"""One rank of many, played on one device: its exchanges bring numbers of the right kind, and leave nothing behind."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from diptych.attention.collectives import Traffic, start_all_gather, start_all_reduce, start_all_to_all
from diptych.attention.place import Group
from diptych.bench.geometry import Geometry
from diptych.bench.layouts import bench_layouts, process_group
from diptych.parallel import Layout

CPU = torch.device("cpu")


def test_an_exchange_brings_what_this_rank_sends():
    with process_group(Layout(ulysses=3), CPU, simulate=True):
        group = Group(dist.group.WORLD.group_name, 3, 0)
        with Traffic() as traffic:
            there = start_all_to_all(torch.arange(5.0), [2, 2, 1], [2, 4, 6], group).wait()
            gathered = start_all_gather(torch.tensor([[1.0, 2.0]]), group).wait()
            summed = start_all_reduce(torch.tensor([7.0]), group).wait()
    assert there.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert gathered.tolist() == [[1, 2]] * 3
    assert summed.tolist() == [7]
    assert traffic.bytes == 3 * 4 + 2 * 8 + 2 * 2 * 4 // 3, "counted as ever"


def test_afterwards_collectives_are_real_again():
    def played() -> list[bool]:
        names = ("all_to_all_single", "all_gather_into_tensor", "all_reduce")
        return [torch._C._dispatch_has_kernel_for_dispatch_key(f"_c10d_functional::{name}", "CPU") for name in names]

    for _ in range(2):
        with process_group(Layout(ulysses=2), CPU, simulate=True):
            assert all(played())
        assert not any(played())


def test_a_rank_of_two_holds_half_the_tokens_and_sends_half_its_heads():
    size = Geometry.parse("64x32x9")
    result = bench_layouts("tiny", size, [1, 2], device=CPU, blocks=1, text_tokens=5, repeats=1)
    rows = {row["layout"]: row for row in result["layouts"]}
    assert rows["single"]["tokens"] == size.tokens == 2 * rows["ulysses=2"]["tokens"]
    assert rows["ulysses=2"]["efficiency"] == pytest.approx(rows["ulysses=2"]["compute_speedup"] / 2)
    assert rows["cfg=2"]["bytes_per_forward"] == 0 < rows["ulysses=2"]["bytes_per_forward"]
