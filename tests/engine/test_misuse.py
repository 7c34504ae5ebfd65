"""An engine in the hands of somebody unlucky: wrong types, calls from its own callbacks, faults at every stage."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
from test_parity import SMALL

from diptych.engine.engine import Engine
from diptych.errors import Cancelled, LayoutError, MediaError, RequestError, UserError
from diptych.request import ClipRequest

REQUEST = ClipRequest("a red circle", **SMALL)


@pytest.fixture(scope="module")
def engine(tiny_base):
    with Engine.load(tiny_base, device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def first(engine):
    return engine.generate(REQUEST)


WRONG = {
    "layout": [5, b"ulysses=2", []],
    "device": [5.5, [], "tpu"],
    "dtype": [[], 5, "int8"],
    "precision": [None, [], "FP8"],
    "modulation": [None, {}],
    "step_timeout": ["x", None, 0, -1, float("nan"), float("inf"), 1e300],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_options_of_another_kind_are_refused_by_name(tiny_base, name, value):
    with pytest.raises(UserError, match=name):
        Engine.load(tiny_base, **({"device": "cpu"} | {name: value}))


@pytest.mark.parametrize("name", ["layout", "dtype", "precision", "modulation", "offload", "memory", "decode_memory"])
def test_a_typing_error_is_refused_before_a_checkpoint_is_fetched(name):
    with pytest.raises(UserError, match=f"{name} .*'lots'"):
        Engine.load("./no such checkpoint", device="cpu", **{name: "lots"})


def test_a_folder_of_traces_that_cannot_be_is_refused_before_a_weight_is_read(tiny_base):
    told = []
    with pytest.raises(MediaError, match="is not a folder"):
        Engine.load(tiny_base, device="cpu", trace=f"{__file__}/traces", on_progress=told.append)
    assert not told


def test_an_environment_that_torchrun_did_not_make_is_refused(tiny_base, monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "two"), ("MASTER_ADDR", "x")):
        monkeypatch.setenv(name, value)
    with pytest.raises(LayoutError, match="WORLD_SIZE = 'two'"):
        Engine.load(tiny_base, device="cpu")


@pytest.mark.parametrize("request_", [None, "a prompt", {"prompt": "x"}])
def test_what_is_no_request_is_refused(engine, request_):
    with pytest.raises(RequestError, match="a ClipRequest"):
        engine.generate(request_)


@pytest.mark.parametrize("fault", [Cancelled, KeyboardInterrupt, ZeroDivisionError])
@pytest.mark.parametrize("at", [("text", 0), ("text", 2), ("denoise", 0), ("denoise", 3), ("decode", 0), ("decode", 2)])
def test_a_fault_of_the_callers_at_any_stage_is_raised_and_leaves_nothing(engine, first, at, fault):
    def on_step(progress):
        if (progress.stage, progress.done) == at:
            raise fault("here")

    with pytest.raises(fault, match="here"):
        engine.generate(replace(REQUEST, seed=99), on_step)
    if at == ("decode", 2):  # a clip costs a second
        assert np.array_equal(engine.generate(REQUEST).frames, first.frames)


@pytest.mark.parametrize("callback", ["on_step", "on_frames"])
@pytest.mark.parametrize("call", [lambda engine: engine.generate(REQUEST), lambda engine: engine.close()])
def test_a_call_from_a_callback_says_so_and_does_not_wait_for_itself(engine, call, callback):
    with pytest.raises(RuntimeError, match="from a callback of the same engine"):
        engine.generate(REQUEST, **{callback: lambda told: call(engine)})


def test_the_current_folder_may_change_while_an_engine_lives(tiny_base, first, tmp_path, monkeypatch):
    monkeypatch.chdir(tiny_base.parent)
    with Engine.load(f"./{tiny_base.name}", device="cpu") as engine:
        os.chdir(tmp_path)
        clip = engine.generate(REQUEST)
    assert clip.report["fingerprint"] == first.report["fingerprint"]
    assert np.array_equal(clip.frames, first.frames)


def test_a_closed_engine_says_so(tiny_base):
    engine = Engine.load(tiny_base, device="cpu")
    engine.close()
    engine.close()
    with pytest.raises(RuntimeError, match="closed"):
        engine.generate(REQUEST)
