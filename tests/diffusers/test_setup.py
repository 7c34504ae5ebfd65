"""Switching on is all or nothing, and what cannot be done is said in one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import ContextParallelConfig, FirstBlockCacheConfig
from diffusers.models import attention_backend
from diffusers.models.transformers.transformer_flux import FluxAttnProcessor, FluxIPAdapterAttnProcessor
from dropin_models import Call, build
from errors_work import refused, seeds, state, switched, too_few_tokens

import diptych.diffusers
from diptych.diffusers.flux import FluxSeams
from diptych.errors import KernelError, LayoutError
from diptych.parallel import Layout


@pytest.fixture
def flux() -> Any:
    return build("flux")


def refusal(error: type[Exception], what: Any, *args: Any) -> str:
    with pytest.raises(error) as caught:
        what(*args)
    return str(caught.value)


def forward(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**Call("flux").arguments()).sample


def test_no_process_group(flux: Any) -> None:
    before = state(flux)
    sentence = (
        "layout ring=2,ulysses=2 needs a process group of 4 ranks, and none is running: start the script with torchrun "
        "and call torch.distributed.init_process_group first."
    )
    assert refusal(LayoutError, diptych.diffusers.parallelize, flux, "ring=2,ulysses=2") == sentence
    with pytest.raises(LayoutError, match="needs a process group"):
        flux.enable_parallelism(config=ContextParallelConfig(ring_degree=2, ulysses_degree=2))
    assert state(flux) == before


def test_a_class_that_is_not_known_names_those_that_are() -> None:
    sentence = (
        "model Linear is not accepted: one of Kandinsky6Transformer3DModel, FluxTransformer2DModel, "
        "HunyuanVideoTransformer3DModel."
    )
    assert refusal(LayoutError, diptych.diffusers.parallelize, torch.nn.Linear(1, 1), "ring=2") == sentence


def test_guidance_is_not_split_here(flux: Any) -> None:
    assert "layout cfg = 2 is not accepted here" in refusal(LayoutError, diptych.diffusers.parallelize, flux, "cfg=2")


def test_a_backend_that_cannot_names_one_that_can(flux: Any) -> None:
    before = state(flux)
    with attention_backend("flex"):
        sentence = refusal(KernelError, diptych.diffusers.parallelize, flux, "single")
    assert sentence.startswith("attention backend flex is not accepted")
    assert "use native, _native_cudnn" in sentence
    assert state(flux) == before
    diptych.diffusers.parallelize(flux, "single")
    with attention_backend("flex"):
        assert refusal(KernelError, forward, flux) == sentence


def test_an_unknown_processor_is_refused_also_later(flux: Any) -> None:
    attn = flux.transformer_blocks[0].attn
    other = FluxIPAdapterAttnProcessor(40, 24)
    attn.set_processor(other)
    with pytest.raises(LayoutError, match=r"FluxIPAdapterAttnProcessor of transformer_blocks.0.attn is not accepted"):
        diptych.diffusers.parallelize(flux, "single")
    attn.set_processor(FluxAttnProcessor())
    diptych.diffusers.parallelize(flux, "single")
    attn.set_processor(other)
    with pytest.raises(LayoutError, match="is FluxIPAdapterAttnProcessor now, which is not split"):
        forward(flux)
    diptych.diffusers.disable(flux)
    assert attn.processor is other


def test_a_cache_that_decides_by_its_own_tokens_is_refused(flux: Any) -> None:
    flux.enable_cache(FirstBlockCacheConfig())
    with pytest.raises(LayoutError, match="FirstBlockCache is not accepted"):
        diptych.diffusers.parallelize(flux, "single")


def test_one_rank_is_the_stock_model_and_can_be_undone(flux: Any) -> None:
    before, stock = state(flux), forward(flux)
    diptych.diffusers.parallelize(flux, Layout())
    assert torch.equal(forward(flux), stock)
    with torch.no_grad():
        assert torch.equal(flux(*Call("flux").arguments().values()).sample, stock), "arguments by position"
    assert "already: call diptych.diffusers.disable(model) first" in refusal(
        LayoutError, diptych.diffusers.parallelize, flux, "single"
    )
    diptych.diffusers.disable(flux)
    assert state(flux) == before
    assert "is not parallel" in refusal(LayoutError, diptych.diffusers.disable, flux)


def test_a_failure_half_way_leaves_nothing(flux: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: Any) -> None:
        raise RuntimeError("half way")

    before, stock = state(flux), forward(flux)
    monkeypatch.setattr(FluxSeams, "hooks", fail)
    with pytest.raises(RuntimeError, match="half way"):
        diptych.diffusers.parallelize(flux, "single")
    assert state(flux) == before
    assert torch.equal(forward(flux), stock)


@pytest.mark.distributed
def test_degrees_that_do_not_fit_leave_the_model_as_it_was(ranks) -> None:
    for sentences, untouched in ranks(2)(refused, {"ring_degree": 2, "ulysses_degree": 2}, Layout(ulysses=2)):
        assert sentences == [
            "layout ring=2,ulysses=2 needs 4 ranks, 2 are running.",
            "mesh with ring = 1 and ulysses = 2 is not accepted for layout ring=2,ulysses=2: the degrees must be the "
            "mesh's sizes.",
        ]
        assert untouched


@pytest.mark.distributed
def test_a_rank_without_tokens_is_refused_on_all(ranks) -> None:
    sentence = "2 tokens are not accepted on 3 ranks: at least one for each of them."
    assert ranks(3)(too_few_tokens, Layout(ring=3)) == [sentence] * 3


@pytest.mark.distributed
def test_another_configuration_after_disable(ranks) -> None:
    for results in ranks(4)(switched, [Layout(ulysses=4), Layout(ring=2, ulysses=2)]):
        assert all("is parallel already" in sentence for sentence in results)


@pytest.mark.distributed
def test_a_forgotten_seed_is_told_on_every_rank(ranks) -> None:
    sentence = (
        "the ranks were given different latents: call the pipeline on every rank with "
        "generator=torch.Generator().manual_seed(seed) and the same seed."
    )
    assert ranks(2)(seeds, Layout(ring=2), False) == [sentence] * 2
    assert ranks(2)(seeds, Layout(ring=2), True) == [""] * 2
