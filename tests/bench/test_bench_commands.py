"""`diptych bench` on tiny models: every command measures, prints and writes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from diptych.cli.bench import app


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


def test_decode_beside_diffusers(bench):
    result = bench("decode", "--tiny", "--geometry", "64x32x21", "--against", "diffusers")
    assert set(result["seconds"]) == {"diptych", "diffusers"}
    assert result["pixels_apart"]["most"] <= 1
    assert result["tiles"]["diptych"] == 2


def test_a_clip_stage_by_stage(bench, tiny_distilled):
    result = bench("clip", tiny_distilled, "--geometry", "64x32x5", "--steps", 2)
    stages = [result["seconds"][name] for name in ("text", "denoise", "decode")]
    assert 0 < sum(stages) <= result["seconds"]["clip"] * 1.01
    assert result["report"]["precision"] == "exact"


def test_loading_rate(bench, tiny_base):
    result = bench("load", tiny_base)
    assert result["bytes"] > 0
    assert result["bytes_per_second"] == pytest.approx([result["bytes"] / spent for spent in result["seconds"]])


def test_a_forward_in_fp8(bench):
    what = ("--model", "tiny", "--geometry", "64x32x5", "--blocks", 1, "--text", 5)
    result = bench("forward", *what, "--fp8", "--no-floor")
    assert set(result["seconds"]) == {"diptych", "diptych fp8"}
    assert 1e-3 < result["fp8_difference"] < 0.1
