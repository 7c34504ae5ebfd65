"""`diptych bench` on tiny models: every command measures, prints and writes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from diptych.cli.bench import app
from diptych.errors import RequestError


@pytest.fixture
def bench(tmp_path):
    def run(*arguments: object) -> dict:
        out = tmp_path / "result.json"
        given = [str(argument) for argument in arguments]
        answer = CliRunner().invoke(app, [*given, "--device", "cpu", "--repeats", "1", "--json", str(out)])
        assert answer.exit_code == 0, answer.output
        result = json.loads(out.read_text())
        assert "seconds" in result
        return result

    return run


def test_a_step_is_two_forwards_and_one_when_distilled(bench):
    size = ("--geometry", "64x32x5", "--blocks", 1, "--text", 5)
    assert bench("step", "--model", "tiny", *size)["forwards"] == 2
    assert bench("step", "--model", "tiny-distill", *size)["forwards"] == 1


def test_a_tiny_model_is_measured_at_a_tiny_size(bench):
    assert bench("step", "--model", "tiny-distill", "--blocks", 1)["geometry"] == "96x64x9"


def test_decode_beside_diffusers(bench):
    result = bench("decode", "--tiny", "--geometry", "64x32x21", "--against", "diffusers")
    assert set(result["seconds"]) == {"diptych", "diffusers"}
    assert result["pixels_apart"]["most"] <= 1
    assert result["tiles"]["diptych"] == 2


def test_a_clip_stage_by_stage(bench, tiny_distilled):
    result = bench("clip", tiny_distilled, "--geometry", "64x32x5", "--steps", 2, "--precision", "fp8:first=1")
    stages = [result["seconds"][name] for name in ("text", "denoise", "decode")]
    assert 0 < sum(stages) <= result["seconds"]["clip"] * 1.01
    assert result["report"]["precision"] == "fp8:first=1"


def test_loading_rate(bench, tiny_base):
    result = bench("load", tiny_base)
    assert result["bytes"] > 0
    assert result["bytes_per_second"] == pytest.approx([result["bytes"] / spent for spent in result["seconds"]])


def test_a_forward_in_fp8(bench):
    what = ("--model", "tiny", "--geometry", "64x32x5", "--blocks", 1, "--text", 5)
    result = bench("forward", *what, "--precision", "fp8", "--no-floor")
    assert set(result["seconds"]) == {"diptych", "diptych fp8"}
    assert 1e-3 < result["fp8_difference"] < 0.1


def test_blocks_that_stay_exact_in_a_forward_and_in_a_step(bench):
    what = ("--model", "tiny", "--geometry", "64x32x5", "--blocks", 3, "--text", 5)
    whole = bench("forward", *what, "--precision", "fp8:first=1,last=2", "--no-floor")
    assert whole["precision"] == "fp8:first=1,last=2"
    assert whole["fp8_difference"] == 0
    assert bench("forward", *what, "--precision", "fp8:first=1", "--no-floor")["fp8_difference"] > 1e-3
    assert bench("step", *what, "--precision", "fp8:last=1")["precision"] == "fp8:last=1"


@pytest.mark.parametrize("command", ["forward", "step"])
@pytest.mark.parametrize(
    ("precision", "told"),
    [
        ("fp4", "exact, fp8, fp8:1 for exact attention"),
        ("fp8:first=3,last=1", "first and last together at most the 3 blocks of this model"),
        ("fp8:1", "one without steps, such as fp8:first=2,last=2: here no clip is made"),
    ],
)
def test_a_precision_that_cannot_be_timed_is_refused(command, precision, told):
    given = ["--model", "tiny", "--geometry", "64x32x5", "--precision", precision, "--device", "cpu"]
    refused = CliRunner().invoke(app, [command, *given]).exception
    assert isinstance(refused, RequestError)
    assert str(refused).startswith(f"precision = '{precision}' is not accepted: {told}")
