"""Precision and modulation as an engine takes them: tables change nothing, fp8 changes what it names."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from diptych.attention import Role, kernels, local
from diptych.engine.components import Components
from diptych.engine.engine import Engine
from diptych.engine.options import Options
from diptych.errors import RequestError
from diptych.memory import fp8
from diptych.memory.precision import EXACT, FP8, Precision
from diptych.model.checkpoint import Checkpoint
from diptych.model.fp8 import Fp8Linear
from diptych.model.loading import load_transformer
from diptych.model.transformer import Transformer
from diptych.request import ClipRequest

REQUEST = ClipRequest("a red ball", width=64, height=48, frames=5, steps=2, guidance=3.0, seed=7)


def clip(checkpoint, **options):
    with Engine.load(checkpoint, device="cpu", **options) as engine:
        return engine.generate(REQUEST)


@pytest.fixture(scope="module")
def exact(tiny_base):
    return clip(tiny_base)


def test_tables_change_nothing(tiny_base, exact, monkeypatch):
    monkeypatch.setattr(Transformer, "modulations", lambda *_, **__: pytest.fail("a step computed its modulation"))
    other = clip(tiny_base, modulation="tables")
    assert np.array_equal(other.frames, exact.frames)
    assert np.array_equal(other.audio, exact.audio)
    assert other.report["modulation"] == "tables"


def test_fp8_is_another_clip_and_says_so(tiny_base, exact):
    other = clip(tiny_base, precision="fp8")
    assert (exact.report["precision"], other.report["precision"]) == ("exact", "fp8")
    apart = other.latents["video"] - exact.latents["video"]
    error = np.linalg.norm(apart) / np.linalg.norm(exact.latents["video"])
    assert 1e-4 < error < 0.1


def test_a_checkpoint_is_quantised_while_it_is_read(tiny_base):
    """Loading into a quantised model equals quantising the loaded one, bit for bit."""
    checkpoint = Checkpoint.open(tiny_base)
    models = []
    for first in (True, False):
        with torch.device("meta"):
            model = Transformer(checkpoint.transformer)
            if first:
                fp8.quantise(model)
        load_transformer(model, checkpoint, device="cpu", dtype=torch.bfloat16)
        models.append(model if first else fp8.quantise(model))
    layers = [dict(model.named_modules()) for model in models]
    quantised = [name for name, module in layers[0].items() if isinstance(module, Fp8Linear)]
    assert len(quantised) == 3 * len(fp8.VIDEO_LINEARS)
    for name in quantised:
        streamed, later = layers[0][name], layers[1][name]
        assert torch.equal(streamed.weight.view(torch.uint8), later.weight.view(torch.uint8))
        assert torch.equal(streamed.weight_scale, later.weight_scale)
        assert streamed.dtype is later.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("precision", "blocks", "steps"),
    [
        ("fp8", 3, 2),
        ("fp8:1", 3, 1),
        ("fp8:first=1", 2, 2),
        ("fp8:steps=1,first=1,last=1", 1, 1),
        ("fp8:last=3", 0, 2),
    ],
)
def test_first_steps_and_outer_blocks_attend_exactly(tiny_base, monkeypatch, precision, blocks, steps):
    """As on a GPU; here with an inexact kernel that only the test knows, two steps and three blocks."""
    flash = next(kernel for kernel in kernels.KERNELS if kernel.device == "cpu")
    calls = []

    def counted(*args):
        calls.append(len(calls))
        return flash.core(*args)

    rough = replace(flash, name="rough", exact=False, core=counted)
    monkeypatch.setattr(kernels, "KERNELS", (rough, *kernels.KERNELS))
    monkeypatch.setattr(local, "KERNELS", kernels.KERNELS)
    monkeypatch.setattr(Options, "kernels", {Role.VISUAL_SELF: "rough"})
    made = clip(tiny_base, precision=precision)
    assert made.report["precision"] == precision
    assert len(calls) == blocks * 2 * steps, "in each of these blocks and steps, in both lanes"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("precision", "fp4"),
        ("precision", "fp8:"),
        ("precision", "fp8:x"),
        ("precision", "exact:1"),
        ("precision", "fp8:middle=1"),
        ("precision", "fp8:first=-1"),
        ("precision", "fp8:first=1,first=2"),
        ("precision", "fp8:1,last=2"),
        ("precision", "fp8:first=1,"),
        ("precision", "fp8:first=12345"),
        ("modulation", "gone"),
    ],
)
def test_other_names_are_refused(tiny_base, monkeypatch, field, value):
    monkeypatch.setattr(Components, "load", lambda *_, **__: pytest.fail("weights were touched"))
    with pytest.raises(RequestError, match=f"{field} = '{value}' is not accepted"):
        Engine.load(tiny_base, device="cpu", **{field: value})


@pytest.mark.parametrize(
    ("text", "meant", "told"),
    [
        ("exact", EXACT, "exact"),
        ("fp8", FP8, "fp8"),
        ("fp8:0", FP8, "fp8"),
        ("fp8:3", Precision("fp8", steps=3), "fp8:3"),
        ("fp8:steps=3", Precision("fp8", steps=3), "fp8:3"),
        ("fp8:last=2", Precision("fp8", last=2), "fp8:last=2"),
        ("fp8:last=2,steps=1,first=4", Precision("fp8", 1, 4, 2), "fp8:steps=1,first=4,last=2"),
    ],
)
def test_a_precision_is_read_and_told(text, meant, told):
    assert Precision.parse(text) == meant
    assert str(meant) == told
    assert Precision.parse(told) == meant


@pytest.mark.parametrize(
    ("precision", "blocks"),
    [("fp8", {0, 1, 2}), ("fp8:first=1", {1, 2}), ("fp8:last=2", {0}), ("fp8:first=1,last=1", {1}), ("exact", set())],
)
def test_an_engine_quantises_the_other_blocks(tiny_base, precision, blocks):
    with Engine.load(tiny_base, device="cpu", precision=precision) as engine:
        modules = engine._executor._runner.components.transformer.named_modules()
        layers = {name for name, module in modules if isinstance(module, Fp8Linear)}
    assert layers == {f"visual_transformer_blocks.{n}.{path}" for n in blocks for path in fp8.VIDEO_LINEARS}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("precision", ["fp8:first=3", "fp8:first=1,last=2"])
def test_with_all_blocks_exact_the_clip_has_the_bits_of_an_exact_one(tiny_base, exact, dtype, precision):
    want = exact if dtype == "float32" else clip(tiny_base, dtype=dtype)
    got = clip(tiny_base, dtype=dtype, precision=precision)
    assert all(np.array_equal(got.latents[name], want.latents[name]) for name in want.latents)
    assert np.array_equal(got.frames, want.frames) and np.array_equal(got.audio, want.audio)
    assert got.report["precision"] == precision


def test_every_block_that_stays_exact_brings_the_clip_nearer(tiny_base, exact):
    texts = ("fp8", "fp8:last=1", "fp8:first=1,last=1")
    videos = [clip(tiny_base, precision=text).latents["video"] for text in texts]
    errors = [np.linalg.norm(video - exact.latents["video"]) for video in videos]
    assert errors[0] > errors[1] > errors[2] > 0


def test_more_exact_blocks_than_there_are_is_refused_before_a_weight_is_read(tiny_base, monkeypatch):
    monkeypatch.setattr(Components, "load", lambda *_, **__: pytest.fail("weights were touched"))
    told = r"precision = 'fp8:first=2,last=2' is not accepted: first and last together at most the 3 blocks"
    for layout in ("single", "cfg=2", "auto"):
        with pytest.raises(RequestError, match=told):
            Engine.load(tiny_base, device="cpu", layout=layout, precision="fp8:first=2,last=2")
