"""Each option of `diptych generate` has its effect on the clip, or on the terminal, through the command itself."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from diptych.cli.main import run
from diptych.media.clip import Clip
from diptych.media.film import Film
from diptych.media.mp4 import read_report

SMALL = ["--width", "48", "--height", "32", "--frames", "5", "--steps", "1", "--seed", "5"]
Generate = Callable[..., Clip]


@pytest.fixture
def generate(tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generate:
    """Run the command in this process; gives the clip as it was handed to the file."""
    written: list[Clip] = []
    save = Film.save

    def keep(film: Film, path: Path, clip: Clip) -> Path:
        written.append(clip)
        return save(film, path, clip)

    monkeypatch.setattr(Film, "save", keep)

    def command(*arguments: str) -> Clip:
        words = ["generate", "a red circle", "--model", str(tiny_base), *SMALL, "--output", str(tmp_path / "a.mp4")]
        monkeypatch.setattr(sys, "argv", ["diptych", *words, *arguments])
        with pytest.raises(SystemExit) as ended:
            run()
        assert not ended.value.code
        return written.pop()

    return command


@pytest.fixture
def picture(tmp_path: Path) -> str:
    """A wide picture, whose ends are unlike its middle."""
    y, x = np.mgrid[0:32, 0:128]
    pixels = np.stack([x * 2, y * 8, np.where(abs(x - 64) < 24, 255, 0)], -1).astype(np.uint8)
    Image.fromarray(pixels).save(tmp_path / "wide.png")
    return str(tmp_path / "wide.png")


def test_fit_chooses_what_becomes_of_a_wide_picture(generate: Generate, picture: str, tmp_path: Path) -> None:
    clips = {fit: generate("--image", picture, "--fit", fit).frames for fit in ("crop", "pad", "stretch")}
    assert (clips["crop"] != clips["pad"]).any()
    assert (clips["crop"] != clips["stretch"]).any()
    assert (clips["pad"] != clips["stretch"]).any()
    with Image.open(picture) as wide:
        wide.crop((40, 0, 88, 32)).save(tmp_path / "middle.png")
    already = generate("--image", str(tmp_path / "middle.png")).frames
    assert (clips["crop"] == already).all(), "covering and cutting out the middle is what crop means, and the default"


def test_audio_level_keeps_or_raises_the_peak(generate: Generate) -> None:
    longer = ("--frames", "9", "--steps", "2")
    kept, raised = (generate(*longer, "--audio-level", level).audio for level in ("clip", "normalize"))
    assert kept is not None
    assert raised is not None
    assert np.abs(kept).max() < 0.99
    assert np.abs(raised).max() == pytest.approx(1.0, abs=1e-6)
    assert np.allclose(raised, kept / np.abs(kept).max(), atol=1e-6)


def test_every_option_stands_in_the_request_that_the_file_tells(
    generate: Generate, picture: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {
        "negative": "blue", "fit": "pad", "fps": 12.5, "guidance": 3.0, "audio_level": "normalize",
        "sigma_grid": "native", "noise_dtype": "bfloat16",
    }  # fmt: skip
    words = [word for name, value in asked.items() for word in ("--" + name.replace("_", "-"), str(value))]
    generate("--image", picture, *words, "--no-audio", "--json", "--quiet", "--dtype", "float32", "--device", "cpu")
    told = read_report(tmp_path / "a.mp4")["request"]
    wanted = asked | {"audio": False, "width": 48, "height": 32, "frames": 5, "steps": 1, "seed": 5}
    assert {name: told[name] for name in wanted} == wanted
    assert json.loads(capsys.readouterr().out)["request"] == told


def test_the_terminal_tells_the_time_left_of_each_step_and_of_none_at_the_end(
    generate: Generate, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # what is shown on a terminal
    monkeypatch.setenv("COLUMNS", "120")
    generate("--steps", "40")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", capsys.readouterr().err)
    lines = re.findall(r"Denoise[^\r\n]*", shown)
    steps = [int(found[1]) for line in lines if (found := re.search(r"(\d+)/40\b", line))]
    assert steps == sorted(steps)
    assert any(re.search(r"\b[1-9]\d?/40\b.*\d+ s left", line) for line in lines)
    assert "40/40" in lines[-1]
    assert "left" not in lines[-1]
