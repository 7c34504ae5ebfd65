"""`diptych calibrate`: measured once, found by fingerprint, never taken for another checkpoint's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from caches_work import SIZE
from typer.testing import CliRunner

from diptych.bench.calibrate import adopt, calibrate
from diptych.cli.main import app
from diptych.errors import CheckpointError, RequestError
from diptych.model.checkpoint import Checkpoint
from diptych.model.tiny import write_tiny
from diptych.request import ClipRequest
from diptych.sampling.caches import CachePlan
from diptych.sampling.caches.calibration import Calibration, Measured, Setting, calibration_path, fit

SHORT = SIZE | {"steps": 4, "frames": 5}


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_run_that_was_stopped_goes_on_where_it_was(engine, empty_cache):
    told = []
    calibrate(engine, ClipRequest("x", **SHORT), ["one"])
    base = ClipRequest("x", **SHORT)
    result = calibrate(engine, base, ["one", "two"], on_clip=lambda done, total, before: told.append(before))
    assert told == [True, False]
    assert [one.prompt for one in result.measured] == ["one", "two"]
    assert Calibration.find(engine.checkpoint.fingerprint) == result


def test_ratios_are_those_of_the_residuals(engine, empty_cache):
    measured = calibrate(engine, ClipRequest("x", **SHORT), ["one"]).measured[0]
    ratios = np.asarray(measured.ratios)
    assert ratios.shape == (2, 4)
    assert (ratios[:, 0] == 1).all()
    assert (np.abs(ratios[:, 1:] - 1) < 0.7).all() and len(np.unique(ratios)) == 7
    assert np.asarray(measured.pairs).shape == (3, 2)
    assert (np.asarray(measured.pairs) > 0).all()


def test_another_checkpoints_file_is_refused_unless_it_is_adopted(engine, empty_cache, tmp_path):
    calibration = calibrate(engine, ClipRequest("x", **SHORT), ["one"])
    other = Checkpoint.open(write_tiny(tmp_path / "other", seed=1))
    mine, theirs = calibration_path(calibration.fingerprint), calibration_path(other.fingerprint)
    theirs.write_bytes(mine.read_bytes())
    with pytest.raises(CheckpointError, match=f"measured on the checkpoint {calibration.fingerprint}, not on this"):
        CachePlan.of("magcache", other)
    theirs.unlink()
    adopt(other, mine)
    resolved = ClipRequest("x", **SHORT).resolve(other.defaults)
    told = CachePlan.of("magcache", other).describe(resolved)["calibration"]
    assert told == f"adopted from checkpoint {calibration.fingerprint}: t2va 48x32x5, 4 steps"
    mine.write_text("{")
    with pytest.raises(CheckpointError, match="is no calibration, or is damaged"):
        CachePlan.of("magcache", engine.checkpoint)


def test_the_nearest_setting_of_the_same_mode_is_taken(engine):
    def one(mode, width, steps, ratio, guided=True):
        setting = Setting(mode, width, 32, 9, steps, guided, "diffusers")
        return Measured(setting, "x", 0, [[1.0] * (steps - 1) + [ratio]] * (1 + guided))

    calibration = Calibration("f", [one("t2va", 48, 6, 1.1), one("t2va", 480, 6, 1.2), one("t2va", 48, 12, 1.3)])
    for width, steps, last in ((64, 6, 1.1), (256, 6, 1.2), (64, 13, 1.3)):
        request = ClipRequest("x", width=width, height=32, frames=9, steps=steps)
        known = calibration.known(request.resolve(engine.defaults))
        assert len(known.ratios[0]) == steps
        assert known.ratios[0][-1] == last
    calibration = Calibration("f", [one("i2va", 48, 6, 1.1), one("t2va", 48, 6, 1.2, guided=False)])
    assert calibration.known(ClipRequest("x").resolve(engine.defaults)) is None, "an image, or only one lane"


def test_the_polynomial_is_fitted_where_there_is_enough_to_fit():
    x = np.linspace(0.1, 0.9, 20)
    coefficients, span = fit(np.stack([x, 3 * x**2 + 0.5], axis=1).tolist())
    assert np.polyval(coefficients, 0.3) == pytest.approx(0.77)
    assert span == (0.1, 0.9)
    assert fit([[0.1, 0.2]] * 8) == ((), (0.0, 0.0))


def test_two_steps_are_too_few(engine, empty_cache):
    with pytest.raises(RequestError, match="steps = 2 is not accepted: 3 or more"):
        calibrate(engine, ClipRequest("x", **(SHORT | {"steps": 2})), ["one"])


def test_the_command(tiny_base, tiny_distilled, empty_cache):
    size = ["--width", "48", "--height", "32", "--frames", "5", "--steps", "4", "--device", "cpu", "--json", "--quiet"]
    done = CliRunner().invoke(app, ["calibrate", str(tiny_base), "--prompt", "one", *size])
    assert done.exit_code == 0, done.output
    told = json.loads(done.output)
    assert told["settings"] == ["t2va 48x32x5, 4 steps"]
    assert json.loads(Path(told["file"]).read_text())["fingerprint"] == Checkpoint.open(tiny_base).fingerprint
    done = CliRunner().invoke(app, ["calibrate", str(tiny_distilled)])
    assert isinstance(done.exception, RequestError)
    made = CliRunner().invoke(
        app,
        ["generate", "x", "--model", str(tiny_base), *size, "--cache", "magcache:5", "--output", told["file"] + ".mp4"],
    )
    assert made.exit_code == 0, made.output
    assert json.loads(made.output)["forwards"] == {
        "computed": 4, "total": 8, "lanes": [{"computed": 2, "total": 4}] * 2
    }  # fmt: skip
