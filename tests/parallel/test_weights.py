"""Weights over ranks: every combination is one rank's arithmetic, and no rank reads or holds more than its part."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import weights_work as work
from safetensors.torch import save_file

from diptych.bench.geometry import random_transformer
from diptych.errors import LayoutError
from diptych.memory.footprint import Setting, transformer_weights
from diptych.memory.precision import FP8, Precision
from diptych.model.config import LITE, TINY
from diptych.model.tiny import write_tiny
from diptych.parallel import Layout
from diptych.parallel.fit import check_fit
from diptych.request import ClipRequest

pytestmark = pytest.mark.distributed

COMBINATIONS = [
    "tensor=2",
    "tensor=3",
    "cfg=2,tensor=2",
    "ulysses=2,tensor=2",
    "ring=2,tensor=2",
    "pipeline=2,tensor=2",
    "ulysses=2,shard=2",
    "ring=3,shard=3",
    "cfg=2,shard=2",
    "ulysses=4,shard=2",
    "cfg=2,ulysses=2,shard=4",
    "ring=2,ulysses=2,shard=4",
    "pipeline=2,ulysses=2,shard=2",
    "cfg=2,tensor=2,shard=2",
    "ulysses=2,tensor=2,shard=2",
]
"""What is held against one rank here; the table in docs/parallel.md is made of it."""

REQUESTS = [
    ClipRequest("a red circle", width=80, height=48, frames=9, steps=3, seed=7),
    ClipRequest("a red circle", width=48, height=32, frames=9, steps=3, seed=7, audio=False),
]


@pytest.fixture(scope="module")
def jobs(tiny_base):
    return work.jobs(str(tiny_base), REQUESTS)


@pytest.fixture(scope="module")
def one_rank(tiny_base, jobs):
    return work.velocities(str(tiny_base), "single", jobs)


def furthest(some, others):
    """The largest difference of velocities; a pair has video and sound, or video alone."""
    largest = 0.0
    for mine, theirs in zip(some, others, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            assert (x is None) == (y is None)
            largest = max(largest, 0.0 if x is None else float(np.abs(x - y).max()))
    return largest


@pytest.mark.parametrize("layout", COMBINATIONS)
def test_a_combination_gives_the_velocities_of_one_rank(layout, one_rank, jobs, tiny_base, ranks):
    parsed = Layout.parse(layout)
    results = ranks(parsed.world)(work.velocities, str(tiny_base), layout, jobs, seconds=240)
    assert min(np.abs(video).max() for video, _ in one_rank) > 0.5
    for of_rank in results:
        assert furthest(of_rank, one_rank) <= (2e-5 if parsed.tensor > 1 else 5e-6)
        assert furthest(of_rank, results[0]) == 0, "ranks differ"


@pytest.mark.parametrize(
    "layout", ["ring=2,ulysses=2", "pipeline=2,ulysses=2", "ulysses=2,tensor=2", "ulysses=2,shard=2"]
)
def test_queries_that_carry_the_scale_give_the_velocities_of_one_rank(layout, one_rank, jobs, tiny_base, ranks):
    """A bound is told with them, and computed once for an attention, also where its weights come and go."""
    alone, attentions = work.bounded_velocities(str(tiny_base), "single", jobs)
    assert 0 < furthest(alone, one_rank) <= 5e-6
    parsed = Layout.parse(layout)
    for of_rank, computed in ranks(parsed.world)(work.bounded_velocities, str(tiny_base), layout, jobs, seconds=240):
        assert furthest(of_rank, one_rank) <= (2e-5 if parsed.tensor > 1 else 5e-6)
        assert computed <= attentions and (parsed.pipeline > 1 or computed == attentions)


def test_shards_alone_keep_every_bit_where_modulations_are_the_same(ranks, tiny_base, jobs, one_rank):
    """Without sound Ulysses has the bits of one rank, and gathered weights are the weights."""
    for of_rank in ranks(2)(work.velocities, str(tiny_base), "ulysses=2,shard=2", jobs[1:]):
        assert furthest(of_rank, one_rank[2:]) == 0


@pytest.mark.parametrize("layout", ["tensor=2", "cfg=2,shard=2"])
def test_modulation_tables_are_made_by_all_ranks_together(layout, ranks, tiny_base, jobs, one_rank):
    for of_rank in ranks(2)(work.velocities, str(tiny_base), layout, jobs, {"modulation": "tables"}):
        assert furthest(of_rank, one_rank) <= 2e-5


@pytest.mark.parametrize("precision", [FP8, Precision("fp8", first=1, last=1)], ids=str)
@pytest.mark.parametrize("layout", ["tensor=2", "ulysses=2,shard=2"])
def test_fp8_is_as_near_to_exact_as_on_one_rank(layout, precision, ranks, tiny_base, jobs, one_rank):
    """Quantised by rows: a shard quantises whole rows, a part of tensor=2 has scales of its own."""
    alone = work.velocities(str(tiny_base), "single", jobs, {"precision": precision})
    results = ranks(2)(work.velocities, str(tiny_base), layout, jobs, {"precision": precision})
    assert 1e-3 < furthest(results[0], one_rank) < 1.5 * furthest(alone, one_rank)
    if layout == "ulysses=2,shard=2":
        assert furthest(results[0], alone) < 1e-4


@pytest.mark.parametrize("layout", ["tensor=2", "ulysses=2,shard=2", "cfg=2", "pipeline=2"])
def test_the_blocks_that_stay_exact_do_so_on_every_rank(layout, ranks, tiny_base, jobs, one_rank):
    precision = Precision("fp8", first=1, last=2)
    for of_rank in ranks(2)(work.velocities, str(tiny_base), layout, jobs, {"precision": precision}):
        assert furthest(of_rank, one_rank) <= 2e-5


@pytest.mark.parametrize("offload", ["model", "block"])
def test_parts_of_layers_wait_in_host_memory_as_whole_ones_do(offload, ranks, tiny_base, jobs):
    more = {"offload": offload, "modulation": "tables" if offload == "block" else "resident"}
    alone = work.latents(str(tiny_base), "single", jobs[0], {})
    for of_rank in ranks(2)(work.latents, str(tiny_base), "tensor=2", jobs[0], more):
        assert np.abs(of_rank - alone).max() <= 2e-5


CONFIG = replace(
    TINY, model_dim=320, ff_dim=1280, model_dim_a=160, ff_dim_a=640, num_visual_blocks=12, num_text_blocks=1
)


@pytest.fixture(scope="module")
def larger(tmp_path_factory):
    """A checkpoint whose transformer, 121 MB, is much larger than one of its twelve blocks."""
    folder = write_tiny(tmp_path_factory.mktemp("larger") / "base")
    model = random_transformer(CONFIG, torch.device("cpu"), torch.float32)
    save_file(model.state_dict(), folder / "transformer" / "diffusion_pytorch_model.safetensors")
    file = folder / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | CONFIG.to_dict()))
    return folder, sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("layout", ["tensor=2", "ulysses=2,shard=2"])
def test_a_rank_reads_and_holds_its_part_and_one_tensor(layout, ranks, larger):
    folder, whole = larger
    slack, outside = 10 << 20, 3 << 20  # FSDP2's own objects take 8 MB for 450 tensors, whatever their size
    parsed = Layout.parse(layout)
    predicted = transformer_weights(CONFIG, Setting(itemsize=4, tensor=parsed.tensor, shard=parsed.shard)).total
    for rank in ranks(Layout.parse(layout).world)(work.memory, str(folder), layout, seconds=240):
        assert rank["of transformer"] <= whole / 2 + outside
        assert rank["of transformer"] == pytest.approx(predicted, rel=0.01)
        assert rank["read"] <= rank["of transformer"] + rank["largest"]
        assert rank["kept"] <= rank["loading"] + slack
        assert rank["loading"] <= rank["kept"] + rank["largest"] + slack
        assert rank["of transformer"] <= rank["running"] + outside
        assert rank["running"] <= rank["kept"] + 2 * whole / 12 + slack, "a block and the next are whole, no more"


def test_who_shares_with_whom(ranks):
    assert [g[0] for g in ranks(4)(work.groups, "cfg=2,tensor=2")] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    results = ranks(4)(work.groups, "cfg=2,tensor=2,shard=2")
    assert [shard for _, _, _, shard in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(spread == [0, 1, 2, 3] and lanes == (0, 0, 1, 1) for _, spread, lanes, _ in results)
    results = ranks(4)(work.groups, "pipeline=2,ulysses=2,shard=2")
    assert [shard for _, _, _, shard in results] == [[0, 1], [0, 1], [2, 3], [2, 3]], "of one stage"


def test_more_parts_than_heads_are_refused():
    check_fit(Layout.parse("tensor=4"), LITE)  # 28 and 14 heads, dealt 4, 4, 3, 3 where they do not divide
    with pytest.raises(LayoutError, match=r"tensor=16 .* 28 video and 14 audio heads to split; at most 14\."):
        check_fit(Layout.parse("tensor=16"), LITE)
    with pytest.raises(LayoutError, match=r"ulysses=8 .* each part of tensor=4 has 7 video heads"):
        check_fit(Layout.parse("tensor=4,ulysses=8"), LITE)
