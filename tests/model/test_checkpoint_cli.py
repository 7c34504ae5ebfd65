"""`diptych checkpoint tiny` and `diptych checkpoint inspect`."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from diptych.cli.checkpoint import app
from diptych.errors import CheckpointError
from diptych.model.checkpoint import Checkpoint


def invoke(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(a) for a in arguments], env={"COLUMNS": "100"}, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_tiny_writes_what_inspect_reads(tmp_path):
    folder = tmp_path / "made"
    assert invoke("tiny", folder, "--distilled", "--seed", 7).strip() == str(folder)
    checkpoint = Checkpoint.open(folder)
    found = json.loads(invoke("inspect", folder, "--json"))
    assert found == json.loads(json.dumps(checkpoint.describe()))
    assert found["kind"] == "distilled" and found["fingerprint"] == checkpoint.fingerprint


def test_inspect_shows_kind_sound_counts_and_configs(tiny_base):
    shown = invoke("inspect", tiny_base)
    checkpoint = Checkpoint.open(tiny_base)
    assert "kind: base: 50 steps, guidance 5" in shown
    assert "sound: yes, latents scaled by 0.5302" in shown
    for name in ("transformer", "vae", "text_encoder", "text_encoder_2", "audio_vae", "vocoder"):
        row = next(line for line in shown.splitlines() if line.startswith(name + " "))
        part = checkpoint[name]
        assert row.split()[1:5] == [*(f"{n:,}" for n in (len(part.tensors), part.parameters, part.nbytes)), "float32"]
    assert "transformer: Kandinsky6Transformer3DModel" in shown and '"num_visual_blocks": 3' in shown


def test_what_is_no_checkpoint_is_an_error_of_the_user(tmp_path):
    with pytest.raises(CheckpointError, match="is no checkpoint"):
        invoke("inspect", tmp_path)
