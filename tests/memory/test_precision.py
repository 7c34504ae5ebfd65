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


def test_the_first_steps_attend_exactly(tiny_base, monkeypatch):
    """`fp8:1` on a GPU; here with an inexact kernel that only the test knows."""
    flash = next(kernel for kernel in kernels.KERNELS if kernel.device == "cpu")
    calls = []

    def counted(*args):
        calls.append(len(calls))
        return flash.core(*args)

    rough = replace(flash, name="rough", exact=False, core=counted)
    monkeypatch.setattr(kernels, "KERNELS", (rough, *kernels.KERNELS))
    monkeypatch.setattr(local, "KERNELS", kernels.KERNELS)
    monkeypatch.setattr(Options, "kernels", {Role.VISUAL_SELF: "rough"})
    made = clip(tiny_base, precision="fp8:1")
    assert made.report["precision"] == "fp8:1"
    assert len(calls) == 3 * 2 * 1, "three blocks, two lanes, the second of two steps"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("precision", "fp4"),
        ("precision", "fp8:"),
        ("precision", "fp8:x"),
        ("precision", "exact:1"),
        ("modulation", "gone"),
    ],
)
def test_other_names_are_refused(tiny_base, monkeypatch, field, value):
    monkeypatch.setattr(Components, "load", lambda *_, **__: pytest.fail("weights were touched"))
    with pytest.raises(RequestError, match=f"{field} = '{value}' is not accepted"):
        Engine.load(tiny_base, device="cpu", **{field: value})
