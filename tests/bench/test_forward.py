"""The benchmark counts what a forward does, and compares like with like."""

from __future__ import annotations

import json
import time

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from diptych.attention import LocalAttend
from diptych.bench import floors, profile
from diptych.bench.forward import forward_call
from diptych.bench.geometry import Geometry, config_named, random_inputs, random_transformer
from diptych.bench.timing import in_turns
from diptych.cli.bench import app
from diptych.errors import RequestError
from diptych.model.config import PRO
from diptych.model.layers import Linear32

CPU = torch.device("cpu")
SIZE = Geometry.parse("64x32x9")


def test_geometry_of_the_vendor_setting():
    geometry = Geometry.parse("864x480x125")
    assert geometry.latents == (32, 60, 108)
    assert geometry.tokens == 51_840
    assert geometry.audio_tokens == 225


@pytest.mark.parametrize("text", ["864x480", "864x480x124", "860x480x125", "x480x125", "864X480x125", "0x480x125"])
def test_other_geometries_are_refused(text):
    with pytest.raises(RequestError, match="864x480x125"):
        Geometry.parse(text)


def test_unknown_models_and_blocks_are_refused():
    with pytest.raises(RequestError, match="pro-distill"):
        config_named("medium")
    with pytest.raises(RequestError, match="1 to 60"):
        config_named("pro", 61)


def test_operations_are_those_that_torch_counts():
    config = config_named("tiny", 2)
    model = random_transformer(config, CPU, torch.float32)
    inputs = random_inputs(config, SIZE, 7, CPU, torch.float32)
    call = forward_call(model, inputs, SIZE, LocalAttend("sdpa-math"))
    left_out = 0  # what time and the embeddings cost: vectors, or once a request

    def count(module, args, out):
        nonlocal left_out
        left_out += 2 * module.weight.numel() * (args[0].numel() // args[0].shape[-1])

    for module in model.modules():
        if isinstance(module, Linear32):
            module.register_forward_hook(count)
    with FlopCounterMode(display=False) as counter:
        call()
    by_kind = counter.get_flop_counts()["Global"]
    products = sum(n for kind, n in by_kind.items() if str(kind) in ("aten.mm", "aten.addmm"))
    attention = sum(n for kind, n in by_kind.items() if str(kind) == "aten.bmm")
    todo = floors.work(config, SIZE, 7)
    text_self = 2 * 4 * 7 * 7 * (80 + 48)  # two text blocks a tower, too small to count
    assert products - left_out == todo.linear_operations
    assert attention == todo.attention_operations + text_self


def test_the_two_numbers_of_pro():
    """4.2e15 operations a forward is the published figure for 121 frames; 125 frames are 3 % more tokens."""
    todo = floors.work(PRO, Geometry.parse("864x480x121"), 200)
    assert todo.linear_operations + todo.attention_operations == pytest.approx(4.2e15, rel=0.05)


def test_calls_in_turns_are_made_as_often_as_said_and_timed_each():
    made = []
    calls = {"slow": (lambda: (made.append("slow"), time.sleep(0.02)), 2), "fast": (lambda: made.append("fast"), 1)}
    seconds = in_turns(calls, torch.device("cpu"), 0.0)
    assert made == 2 * ["slow", "slow", "fast"]
    assert seconds["slow"] >= 0.02 > seconds["fast"]
    in_turns(calls, torch.device("cpu"), 0.3)
    assert len(made) > 6 + 6, "for as long as it takes"


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90", "attention"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob", "attention"),
        ("nvjet_sm90_tst_192x192_64x4_2x1_v_bz_coopB_bias_TNN", "linear"),
        ("_bounded_short_attention", "attention"),
        ("_adaln", "element-wise"),
        ("_conv", "convolution"),
        ("Memcpy HtoD (Pageable -> Device)", "copies"),
    ],
)
def test_kernels_are_classed_by_name(kernel, kind):
    assert profile.classify(kernel) == kind


def test_the_command_writes_what_it_measured(tmp_path):
    out = tmp_path / "forward.json"
    arguments = [
        "forward",
        "--model",
        "tiny",
        "--geometry",
        "64x32x5",
        "--blocks",
        "1",
        "--text",
        "5",
        "--device",
        "cpu",
    ]
    run = CliRunner().invoke(
        app, [*arguments, "--no-floor", "--repeats", "1", "--against", "diffusers", "--json", str(out)]
    )
    assert run.exit_code == 0, run.output
    result = json.loads(out.read_text())
    assert set(result["seconds"]) == {"diptych", "diffusers"}
    assert result["difference"] < 0.02, "bf16 against bf16, the same weights"
    assert result["speedup"] == pytest.approx(result["seconds"]["diffusers"] / result["seconds"]["diptych"])
    assert "diffusers / diptych" in run.output
