"""Text precision: the language model in 8 or 4 bits, close to exact, smaller by what is predicted, and named."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from diptych.codecs.text import TextEncoder
from diptych.engine.components import Components
from diptych.engine.engine import Engine
from diptych.engine.options import Options, pick_text_precision
from diptych.engine.placement import parts_held
from diptych.errors import RequestError
from diptych.memory.footprint import GIB, RELEASED, Setting, Size, footprint
from diptych.memory.precision import EXACT
from diptych.model import quantised
from diptych.model.checkpoint import Checkpoint
from diptych.model.components import load_clip, load_clip_tokenizer, load_text_encoder, load_tokenizer
from diptych.model.config import PRO
from diptych.model.quantised import FORMS, Int8Linear, QuantisedLinear, quantise_linears
from diptych.parallel.layout import Layout
from diptych.planner.choices import Limits, plan
from diptych.planner.machine import machine_of
from diptych.planner.task import task_of
from diptych.request import ClipRequest

REQUEST = ClipRequest("a red ball rolls over the snow", width=64, height=48, frames=5, steps=2, guidance=3.0, seed=7)
ERROR = {"8bit": 0.01, "nf4": 0.12}
"""Of a normal weight, relative: rounding to 255 steps of a row's largest number, and to 16 values in 64 numbers."""

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)
forms = pytest.mark.parametrize("form", ["8bit", pytest.param("nf4", marks=needs_bitsandbytes)])


def clip(folder, **options):
    with Engine.load(folder, device="cpu", **options) as engine:
        return engine.generate(REQUEST)


def apart(one, other):
    return float(torch.linalg.norm((one - other).double()) / torch.linalg.norm(other.double()))


def nbytes(module):
    held = [*module.parameters(), *module.buffers()]
    return sum(tensor.untyped_storage().nbytes() for tensor in held)


@pytest.fixture(scope="module")
def exact(tiny_base):
    return clip(tiny_base)


@forms
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(40, 96), (48, 48), (37, 11), (24, 128)])
@torch.no_grad()
def test_a_layer_multiplies_with_its_weight_rounded_once(form, dtype, shape):
    torch.manual_seed(1)
    linear = nn.Linear(*reversed(shape)).to(dtype)
    nn.init.normal_(linear.weight, std=0.02)
    layer = FORMS[form].of(linear)
    assert 0.4 * ERROR[form] < apart(layer.whole().float(), linear.weight.float()) < ERROR[form]
    x = torch.randn(3, 5, shape[1], dtype=dtype)
    assert layer(x).dtype is dtype
    assert torch.equal(layer(x), nn.functional.linear(x, layer.whole(), linear.bias))


def test_8_bits_are_the_nearest_of_255_steps_and_nothing_stays_nothing():
    weight = torch.tensor([[127.0, -126.4, 0.5001, 0.0], [0.0] * 4, [2.54, -2.54, 0.0301, 1.0]])
    linear = nn.Linear(4, 3, bias=False)
    linear.weight.data = weight
    layer = Int8Linear.of(linear)
    assert layer.weight.tolist() == [[127, -126, 1, 0], [0] * 4, [127, -127, 2, 50]]
    assert torch.equal(layer.whole()[1], weight[1])
    assert torch.allclose(layer.whole()[2], torch.tensor([2.54, -2.54, 0.04, 1.0]))


@forms
def test_weights_are_quantised_one_by_one_as_they_are_read(tiny_base, form, monkeypatch):
    """The same bits as quantising the loaded model, and only one weight at a time is there whole."""
    checkpoint = Checkpoint.open(tiny_base)
    later = load_text_encoder(checkpoint, "cpu", torch.bfloat16)
    quantise_linears(later, form)
    whole = []
    take = QuantisedLinear.take_weight

    def taking(self, weight):
        waiting = [m for m in model[0].modules() if isinstance(m, QuantisedLinear) and m.weight.is_meta]
        ready = [m for m in model[0].modules() if isinstance(m, QuantisedLinear) and not m.weight.is_meta]
        whole.append(len(waiting) + len(ready))
        assert all(m.weight.dtype in (torch.int8, torch.uint8) for m in ready)
        take(self, weight)

    model = []
    quantise = quantised.quantise_linears
    monkeypatch.setattr(
        "diptych.model.components.quantise_linears", lambda made, form: (model.append(made), quantise(made, form))
    )
    monkeypatch.setattr(QuantisedLinear, "take_weight", taking)
    streamed = load_text_encoder(checkpoint, "cpu", torch.bfloat16, form=form)
    assert whole == [21] * 21, "three layers of seven products"
    for name, tensor in later.state_dict().items():
        assert torch.equal(streamed.state_dict()[name], tensor), name


@forms
def test_texts_are_close_to_exact(tiny_base, form):
    checkpoint = Checkpoint.open(tiny_base)
    clip_model = load_clip(checkpoint, "cpu", torch.float32)
    made = []
    for held in (None, form):
        language = load_text_encoder(checkpoint, "cpu", torch.float32, form=held)
        encoder = TextEncoder(load_tokenizer(checkpoint), language, load_clip_tokenizer(checkpoint), clip_model)
        made.append(encoder.encode(["a red ball rolls over the snow", "rain"]))
    want, got = made
    assert torch.equal(got.pooled_BD, want.pooled_BD), "CLIP stays as it is"
    # Three layers of random weights treble the error of one weight: 0.019 and 0.32 on token ids at random.
    assert ERROR[form] < apart(got.text_BLD, want.text_BLD) < 4 * ERROR[form]


@forms
def test_nothing_but_the_products_is_rounded(tiny_base, form):
    """A model in full precision that is given the rounded weights computes the same bits."""
    rounded, whole = (
        load_text_encoder(Checkpoint.open(tiny_base), "cpu", torch.float32, form=held) for held in (form, None)
    )
    for name, layer in rounded.named_modules():
        if isinstance(layer, QuantisedLinear):
            whole.get_submodule(name).weight = nn.Parameter(layer.whole(), requires_grad=False)
    ids = torch.arange(60)[None]
    got, want = (model(input_ids=ids, use_cache=False).last_hidden_state for model in (rounded, whole))
    assert torch.equal(got, want)


@forms
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_are_those_predicted(tiny_base, form, dtype):
    checkpoint = Checkpoint.open(tiny_base)
    held = getattr(torch, dtype)
    options = Options(checkpoint, None, torch.device("cpu"), held, None, text_precision=form)
    model = load_text_encoder(checkpoint, "cpu", held, form=form)
    whole = parts_held(options)
    parts = whole.in_text_precision(form, held.itemsize)
    rotary = sum(buffer.nbytes for name, buffer in model.named_buffers() if "inv_freq" in name)
    assert nbytes(model) - rotary == parts.language < whole.language
    assert nbytes(model.layers[0]) == parts.language_layer
    assert whole.in_text_precision("exact", held.itemsize) == whole


def test_bytes_of_the_released_language_model():
    size = Size(T=32, Y=60, X=108, A=448, L=1024)
    text = {}
    for precision in ("exact", "8bit", "nf4"):
        setting = Setting(offload="model", text_precision=precision)
        text[precision] = footprint(PRO, size, setting, decode=0).phases["text"]
        told = RELEASED.in_text_precision(precision, 2)
        assert told.total - told.language == RELEASED.total - RELEASED.language, "the others stay as they are"
    gib = {precision: round((phase.weights - RELEASED.clip) / GIB, 1) for precision, phase in text.items()}
    assert gib == {"exact": 13.2, "8bit": 7.1, "nf4": 4.4}
    widest = 2 * 18_944 * 3584
    assert text["nf4"].work == text["8bit"].work == text["exact"].work + widest, "one weight is whole at a time"


@forms
def test_an_engine_names_it_and_no_offload_mode_changes_the_clip(tiny_base, exact, form):
    one = clip(tiny_base, text_precision=form)
    assert (exact.report["text_precision"], one.report["text_precision"]) == ("exact", form)
    assert "approximate" not in exact.report
    assert [line for line in one.report["approximate"] if f"text precision {form}" in line]
    error = np.linalg.norm(one.latents["video"] - exact.latents["video"]) / np.linalg.norm(exact.latents["video"])
    assert 1e-5 < error < 0.2
    predicted, plain = (made.report["memory"]["predicted"] for made in (one, exact))
    assert all(predicted[phase] < plain[phase] for phase in ("text", "denoise", "picture", "sound"))
    for offload in ("model", "block"):
        other = clip(tiny_base, text_precision=form, offload=offload)
        assert np.array_equal(other.frames, one.frames) and np.array_equal(other.audio, one.audio)


@pytest.mark.parametrize("value", ["4bit", "NF4", "", None, []])
def test_other_names_are_refused(tiny_base, monkeypatch, value):
    monkeypatch.setattr(Components, "load", lambda *_, **__: pytest.fail("weights were touched"))
    with pytest.raises(RequestError, match=r"text_precision = .* is not accepted: exact, 8bit or nf4"):
        Engine.load(tiny_base, device="cpu", text_precision=value)


def test_nf4_without_its_package_is_refused_and_8bit_is_not(tiny_base, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "bitsandbytes" else find(name, *rest)
    )
    with pytest.raises(
        RequestError, match=r"text_precision = 'nf4' .* pip install \"diptych\[text-nf4\]\"; 8bit takes"
    ):
        pick_text_precision("nf4")
    assert pick_text_precision("8bit") == "8bit"


def test_the_document_tells_what_is_counted():
    """docs/memory.md: what the first rank holds where the weights of Pro are in eight pieces."""
    text = (Path(__file__).parents[2] / "docs" / "memory.md").read_text()
    rows = dict(re.findall(r"^\| `(exact|8bit|nf4)` \|.*?\| ([\d.]+ GiB \| [\d.]+ GiB) \|", text, re.M))
    task, machine = task_of("pro"), machine_of("8xH100-80")
    for precision in ("exact", "8bit", "nf4"):
        fixed = Limits(layout=Layout(ulysses=8, shard=8), precision=EXACT, text_precision=precision)
        best = plan(task, machine, fixed).best
        language = RELEASED.in_text_precision(precision, 2).language
        assert rows.pop(precision) == f"{language / GIB:.1f} GiB | {best.first.peak / GIB:.1f} GiB"
    assert f"{best.others.peak / GIB:.1f} GiB on each of the others" in " ".join(text.split())
