"""PipeFusion of stock models: exact in warm-up, then of the staleness that it promises; and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from dropin_models import Call, build
from pipe_models_work import exact, piped, refused_forwards, simulated
from test_setup import refusal

import diptych.diffusers
from diptych.errors import LayoutError
from diptych.parallel import Layout

CALLS = {
    "kandinsky6": Call("kandinsky6", audio=9, batch=2),
    "flux": Call("flux-guidance", grid=(1, 5, 5), guidance=True),
}
BLOCKS = {"kandinsky6": 3, "flux": 4}
LAYOUTS = [Layout(pipeline=2), Layout(pipeline=2, ulysses=2), Layout(pipeline=2, ring=2)]


def apart(a: Any, b: Any) -> float:
    return max(float((x - y).abs().max()) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True))


@pytest.mark.distributed
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_staleness_is_that_of_one_process(ranks, layout: Layout, name: str) -> None:
    expected = simulated(CALLS[name], 1, 3)
    assert apart(expected, exact(CALLS[name])) > 1e-3, "nothing is stale"
    results = ranks(layout.world)(piped, layout, CALLS[name], 1, 3)
    for rank in results:
        for run in rank["runs"]:  # the second is a new request: nothing of the first may be seen
            assert apart(run, expected) <= 5e-6
            assert apart(run, results[0]["runs"][0]) == 0, "ranks differ"
        assert rank["undone"]


@pytest.mark.distributed
def test_four_stages(ranks) -> None:
    expected = simulated(CALLS["flux"], 2, 4)
    results = ranks(4)(piped, Layout(pipeline=4), CALLS["flux"], 2, 4)
    assert all(apart(run, expected) <= 5e-6 for rank in results for run in rank["runs"])
    held = [rank["held"] for rank in results]
    blocks = [{n.rsplit(".attn")[0] for n in of_rank if ".attn." in n} for of_rank in held]
    assert [len(of_rank) for of_rank in blocks] == [1, 1, 1, 1], "each rank holds its own block, under its own name"
    assert set().union(*blocks) == {f"{kind}transformer_blocks.{n}" for kind in ("", "single_") for n in (0, 1)}


@pytest.mark.distributed
@pytest.mark.parametrize("name", CALLS)
def test_warm_up_alone_is_the_stock_model_to_the_bit(ranks, name: str) -> None:
    expected = exact(CALLS[name])
    for rank in ranks(2)(piped, Layout(pipeline=2), CALLS[name], 3, 3):
        assert all(apart(run, expected) == 0 for run in rank["runs"])


@pytest.mark.distributed
def test_what_a_forward_refuses(ranks) -> None:
    for control, mask, compiled in ranks(2)(refused_forwards, Layout(pipeline=2)):
        assert (
            control
            == "controlnet_block_samples is not accepted with pipeline stages: use ring and ulysses for ControlNets."
        )
        assert mask == "attention_mask is not accepted with pipeline stages: use ring and ulysses with masks."
        assert compiled.startswith("compiled blocks are not accepted with pipeline stages")


def test_refusals() -> None:
    parallelize = diptych.diffusers.parallelize
    assert "PipeFusion is there for Kandinsky6Transformer3DModel, FluxTransformer2DModel; use ring and ulysses" in (
        refusal(LayoutError, parallelize, build("hunyuan"), "pipeline=2")
    )
    flux = build("flux")
    assert refusal(LayoutError, parallelize, flux, "pipeline=5") == (
        "layout pipeline = 5 is not accepted: the model has 4 blocks to split."
    )
    with pytest.raises(LayoutError, match="warmup = 2 is not accepted with layout ring=2: it goes with pipeline=2"):
        parallelize(flux, "ring=2", warmup=2)
    with pytest.raises(LayoutError, match="patches = 0 is not accepted: a whole number from 1 to 1000"):
        parallelize(flux, "pipeline=2", patches=0)
