"""The library cache-dit on the fused block's two streams: its rule, its extrapolation, and what is refused."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from caches_work import CACHES, SIZE

from diptych.errors import RequestError
from diptych.request import ClipRequest
from diptych.sampling.caches import CachePlan

pytest.importorskip("cache_dit")
SILENT = ClipRequest("waves", **SIZE, audio=False)


def test_with_one_front_block_and_no_sound_it_is_the_first_block_cache(engine):
    """Two implementations of one rule: the same forwards are predicted, and from the same residuals."""
    clips = [engine.generate(SILENT, cache=f"{name}:0.45,2,0.2") for name in ("cachedit", "firstblock")]
    assert 0 < clips[0].report["forwards"]["computed"] < 2 * SIZE["steps"]
    assert clips[0].report["forwards"] == clips[1].report["forwards"]
    assert np.array_equal(clips[0].frames, clips[1].frames)


def test_order_and_blocks_change_what_is_predicted(engine):
    texts = ["cachedit:0.45", "cachedit:0.45,order=1", "cachedit:0.45,order=2", "cachedit:0.45,front=2"]
    latents = [engine.generate(SILENT, cache=text).latents["video"] for text in texts]
    for number, one in enumerate(latents):
        assert not any(np.array_equal(one, other) for other in latents[:number])


def test_both_streams_are_predicted(engine):
    exact = engine.generate(ClipRequest("waves", **SIZE))
    clip = engine.generate(ClipRequest("waves", **SIZE), cache=CACHES["cachedit"])
    for name in ("video", "audio"):
        stray = np.abs(clip.latents[name] - exact.latents[name]).mean() / np.abs(exact.latents[name]).mean()
        assert 0 < stray < 0.2, name


def test_it_is_what_the_library_makes_of_stock_diffusers(engine, tiny_base):
    """Its own way in, on diffusers' pipeline: the fused block is its pattern of two inputs and two outputs."""
    from cache_dit import BlockAdapter, DBCacheConfig, ForwardPattern, enable_cache
    from diffusers import Kandinsky6TI2VAPipeline

    pipe = Kandinsky6TI2VAPipeline.from_pretrained(tiny_base, torch_dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    blocks = pipe.transformer.visual_transformer_blocks
    pattern = {"forward_pattern": ForwardPattern.Pattern_0, "check_forward_pattern": False}
    config = DBCacheConfig(
        Fn_compute_blocks=1,
        Bn_compute_blocks=0,
        residual_diff_threshold=0.45,
        max_warmup_steps=2,
        max_continuous_cached_steps=2,
        enable_separate_cfg=False,
    )
    enable_cache(BlockAdapter(pipe=pipe, transformer=pipe.transformer, blocks=blocks, **pattern), cache_config=config)
    last = {}

    def keep(pipe, step, t, tensors):
        last.update(tensors)
        return {}

    pipe(
        "waves",
        height=SIZE["height"],
        width=SIZE["width"],
        num_frames=SIZE["frames"],
        num_inference_steps=SIZE["steps"],
        guidance_scale=1.0,
        generator=torch.Generator().manual_seed(SIZE["seed"]),
        output_type="latent",
        max_sequence_length=128,
        callback_on_step_end=keep,
        callback_on_step_end_tensor_inputs=["latents", "audio_latents"],
    )
    clip = engine.generate(ClipRequest("waves", **SIZE, guidance=1.0), cache="cachedit:0.45,2,0.2,last=0")
    exact = engine.generate(ClipRequest("waves", **SIZE, guidance=1.0))
    assert clip.report["forwards"]["computed"] < SIZE["steps"]
    video, audio = last["latents"][0].permute(3, 0, 1, 2).numpy(), last["audio_latents"][0].T.numpy()
    for name, theirs in (("video", video), ("audio", audio)):
        stray = np.abs(clip.latents[name] - theirs).max()
        assert stray < 1e-4 < np.abs(exact.latents[name] - theirs).max(), name


def test_what_leaves_nothing_to_predict_is_refused(engine):
    blocks = engine.checkpoint.transformer.num_visual_blocks
    with pytest.raises(RequestError, match=f"front and back = '{blocks} and 0' is not accepted: together fewer than"):
        CachePlan.of(f"cachedit:front={blocks}", engine.checkpoint)
    CachePlan.of(f"cachedit:front={blocks - 1}", engine.checkpoint)


def test_without_the_library_it_is_refused_by_name(engine, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("diptych.sampling.caches.cachedit.find_spec", lambda name: None)
    with pytest.raises(RequestError, match=r"it needs the package cache-dit; pip install 'diptych\[cache-dit\]'"):
        CachePlan.of("cachedit", engine.checkpoint)
