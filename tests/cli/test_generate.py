"""`diptych generate`, `show` and `demo` as a user meets them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

from diptych.cli.main import run
from diptych.media.clip import Clip
from diptych.media.mp4 import read_clip, read_report, write

SIZE = ["--width", "48", "--height", "32", "--frames", "9", "--steps", "3"]


WITHOUT_TORCHVISION = "import sys; sys.modules['torchvision'] = None; from diptych.cli.main import run; run()"


@pytest.fixture(scope="module")
def made(tiny_base, tmp_path_factory):
    """By a process of its own, in which torchvision cannot be imported: the package does not need it."""
    folder = tmp_path_factory.mktemp("made")
    command = [
        sys.executable, "-c", WITHOUT_TORCHVISION, "generate", "a red circle", "--model", tiny_base, *SIZE,
        "--seed", "5", "--json", "--output", folder / "a.mp4", "--latents-out", folder / "a.safetensors",
    ]  # fmt: skip
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return folder, done


@pytest.fixture
def diptych(monkeypatch, capsys):
    """Run the command in this process: its exit status, and what it wrote to stdout and stderr."""

    def run_here(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["diptych", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as exit_:
            run()
        return int(exit_.value.code or 0), *capsys.readouterr()

    return run_here


def test_a_clip_with_its_report_and_latents(made):
    folder, done = made
    report = json.loads(done.stdout)
    assert report["file"] == str(folder / "a.mp4")
    assert report["request"]["seed"] == 5
    assert report["forwards"] == {"computed": 6, "total": 6}
    clip = read_clip(folder / "a.mp4")
    assert clip.frames.shape == (9, 32, 48, 3)
    latents = load_file(folder / "a.safetensors")
    assert latents["video"].shape == (1, 16, 3, 4, 6)
    assert latents["audio"].shape == (1, 40, 17)
    assert latents["video"].dtype == latents["audio"].dtype == np.float32
    for stage in ("Load", "Read the text", "Denoise", "Decode", "Write"):
        assert stage in done.stderr
    assert sorted(path.name for path in folder.iterdir()) == ["a.mp4", "a.safetensors"]


def test_show_tells_and_from_makes_it_again(made, tmp_path, diptych):
    folder, _ = made
    status, shown, _ = diptych("show", folder / "a.mp4")
    assert status == 0
    assert "a red circle" in shown
    assert json.loads(diptych("show", folder / "a.mp4", "--json")[1])["request"]["seed"] == 5
    status, _, said = diptych(
        "generate", "--from", folder / "a.mp4", "--output", tmp_path / "b.mp4", "--quiet",
        "--latents-out", tmp_path / "b.safetensors",
    )  # fmt: skip
    assert (status, said) == (0, "")
    one, two = load_file(folder / "a.safetensors"), load_file(tmp_path / "b.safetensors")
    assert all(np.array_equal(one[name], two[name]) for name in one)


def test_a_precision_is_shown_and_kept_unless_another_is_named(tiny_base, tmp_path, diptych):
    """Of two clips that differ in it alone, each is made again as it was."""

    def made(name, *more):
        status, _, said = diptych("generate", *more, "--output", tmp_path / name, "--device", "cpu", "--quiet")
        assert (status, said) == (0, "")
        return read_report(tmp_path / name), read_clip(tmp_path / name)

    fresh = ("a red circle", "--model", tiny_base, "--seed", "5", *SIZE, "--precision", "fp8:first=1,last=1")
    report, clip = made("a.mp4", *fresh)
    assert report["precision"] == "fp8:first=1,last=1"
    assert "fp8:first=1,last=1" in diptych("show", tmp_path / "a.mp4")[1]
    again, same = made("b.mp4", "--from", tmp_path / "a.mp4")
    assert again["precision"] == "fp8:first=1,last=1" and np.array_equal(same.frames, clip.frames)
    other, _ = made("c.mp4", "--from", tmp_path / "a.mp4", "--precision", "exact")
    assert other["precision"] == "exact"


def test_many_clips_and_a_line_that_fails(tiny_base, tmp_path, diptych):
    lines = [
        "a red circle",
        '{"prompt": "waves \u2028 and \x85 wind", "seed": 4, "audio": false}',
        '{"prompt": "x", "width": 50}',
        "{broken",
        "",
        "[1, 2]",
        "null",
        '{"prompt": "x", "image": 5}',
        '{"prompt": "x", "image": ' + "[" * 100_000,
        '{"prompt": "x", "seed": ' + "9" * 5_000 + "}",
    ]
    (tmp_path / "p.jsonl").write_text("\ufeff" + "\r\n".join(lines), newline="")
    status, _, said = diptych(
        "generate", "--prompts", tmp_path / "p.jsonl", "--output-dir", tmp_path / "out", "--model", tiny_base, *SIZE,
        "--quiet",
    )  # fmt: skip
    assert status == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0001.mp4", "0002.mp4"]
    assert "line 3: width = 50 is not accepted" in said
    assert "line 4:" in said
    for number in (6, 7, 8, 9, 10):
        assert f"line {number}: " in said, "numbers are those of the file"
    summary = f"7 of 9 lines failed; the others are in {tmp_path / 'out'}"
    assert said.splitlines()[-1] == summary, "failures are told, however quiet, and no name is broken"
    assert "0001.mp4" not in said, "clips are not"
    assert "7 of 9 lines failed" in said
    assert "Traceback" not in said
    assert read_report(tmp_path / "out" / "0001.mp4")["request"]["prompt"] == "a red circle"
    assert read_clip(tmp_path / "out" / "0002.mp4").audio is None


def test_demo_makes_a_clip_and_a_sheet(tmp_path, diptych):
    status, _, said = diptych("demo", "--output", tmp_path / "d.mp4", "--sheet", tmp_path / "d.png")
    assert status == 0, said
    assert str(tmp_path / "d.mp4") in said
    clip = read_clip(tmp_path / "d.mp4")
    assert len(clip.frames) == 49
    assert clip.audio is not None
    assert Image.open(tmp_path / "d.png").width > 500


INTERRUPTED = """
import atexit, os, signal, sys, threading, time
from diptych.cli.main import run
from diptych.sampling.denoiser import Denoiser

begun, velocity = [], Denoiser.velocity

def counted(*arguments):
    begun.append(True)
    return velocity(*arguments)

Denoiser.velocity = counted

def press_when_denoising(main):
    while True:
        frame = sys._current_frames().get(main)
        while frame is not None:
            if frame.f_code.co_name == "velocity":
                before = len(begun)
                atexit.register(lambda: print("steps begun afterwards:", len(begun) - before))
                os.kill(os.getpid(), signal.SIGINT)
                return
            frame = frame.f_back
        time.sleep(0.01)

threading.Thread(target=press_when_denoising, args=(threading.get_ident(),), daemon=True).start()
run()
"""


def test_ctrl_c_stops_within_one_step_and_leaves_no_file(tiny_base, tmp_path):
    files = ["--output", str(tmp_path / "a.mp4"), "--latents-out", str(tmp_path / "a.safetensors")]
    arguments = ["generate", "x", "--model", str(tiny_base), *SIZE[:-1], "900", *files]
    hearing = (
        "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # a job in the background is deaf
    )
    done = subprocess.run(
        [sys.executable, "-c", hearing + INTERRUPTED, *arguments],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 130, done.stderr
    assert done.stderr.strip().endswith("diptych: stopped")
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
    afterwards = re.fullmatch(r"steps begun afterwards: (\d+)\n", done.stdout)
    assert afterwards is not None
    assert int(afterwards[1]) <= 1


BAD = {
    "no prompt": ([], "PROMPT is missing: say what the clip shows"),
    "a size": (["x", "--width", "50"], "width = 50 is not accepted: a multiple of 16 pixels, such as 48 or 64."),
    "a checkpoint that is none": (["x", "--model", "/nonexistent"], "/nonexistent"),
    "a device that is none": (["x", "--device", "tpu"], "device = 'tpu' is not accepted"),
    "a dtype that is none": (["x", "--dtype", "int8"], "dtype = 'int8' is not accepted"),
    "an image that is none": (["x", "--image", __file__], "test_generate.py"),
    "an image that is not there": (["x", "--image", "/nonexistent.png"], "/nonexistent.png"),
    "a folder that is not there": (["x", "--output", "/nonexistent/a.mp4"], "there is no folder /nonexistent"),
    "seconds and frames": (["x", "--seconds", "3", "--frames", "9"], "either seconds or frames, not both"),
    "no length": (["x", "--seconds", "0"], "seconds = 0.0 is not accepted"),
    "a rate that is none, with a length": (["x", "--seconds", "3", "--fps", "nan"], "fps = nan is not accepted"),
    "prompts without a folder": (["--prompts", __file__], "--output-dir is missing: --prompts"),
    "prompts and a prompt": (["x", "--prompts", __file__, "--output-dir", "/tmp"], "leave it out with --prompts"),
    "a clip that tells nothing": (["--from", __file__], "test_generate.py"),
    "two files that are one": (["x", "--output", "a.mp4", "--latents-out", "./a.mp4"], "they are one file"),
    "a folder of traces that is a file": (["x", "--trace", __file__], "is not a folder"),
    "a folder of traces below a file": (["x", "--trace", f"{__file__}/a/b"], "is not a folder"),
    "a rate that is none": (["x", "--seconds", "3", "--fps", "inf"], "fps = inf is not accepted"),
    "a layout that is none": (["x", "--layout", "ulises=2"], "did you mean ulysses?"),
    "more GPUs than there are": (["x", "--device", "cuda:7"], "device = 'cuda:7' is not accepted"),
}


@pytest.fixture
def refused(monkeypatch, tmp_path, capsys):
    """Run the command in this process, in an empty folder, and give what it said last."""

    def run_refused(*arguments: object) -> str:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["diptych", *map(str, arguments)])
        with pytest.raises(SystemExit) as exit_:
            run()
        assert exit_.value.code == 2
        assert list(tmp_path.iterdir()) == []
        said = capsys.readouterr().err
        assert "Traceback" not in said
        return said

    return run_refused


@pytest.mark.parametrize(("arguments", "sentence"), BAD.values(), ids=BAD.keys())
def test_bad_input_gets_one_sentence(arguments, sentence, tiny_base, refused):
    model = [] if "--model" in arguments else ["--model", tiny_base]
    last = refused("generate", *arguments, *model, "--steps", "1").strip().splitlines()[-1]
    assert last.startswith("diptych: ")
    assert sentence in last


def test_an_unknown_option_is_explained(refused):
    assert "--widht" in refused("generate", "x", "--widht", "64")


@pytest.mark.parametrize("fault", [["--guidance", "5"], ["--image", __file__]])
def test_what_cannot_be_honoured_is_refused_before_a_weight_is_read(fault, tiny_distilled, refused):
    said = refused("generate", "x", "--model", tiny_distilled, *fault)
    assert "diptych: " in said
    assert "Load" not in said


def clip_that_says(report):
    frames = np.random.default_rng(0).integers(0, 256, (2, 16, 16, 3), dtype=np.uint8)
    return Clip(frames, None, 24.0, report=report)


def test_show_prints_what_is_written_and_no_control_characters(tmp_path, monkeypatch, capsys):
    prompt = "a [bold]sign[/bold] that says [/exit] \x1b[31mred\x9b2J"
    file = write(tmp_path / "a.mp4", clip_that_says({"request": {"prompt": prompt}, "notes": ["[/i]"]}))
    monkeypatch.setattr(sys, "argv", ["diptych", "show", str(file)])
    with pytest.raises(SystemExit) as exit_:
        run()
    assert not exit_.value.code
    out = capsys.readouterr().out
    assert "[bold]sign[/bold] that says [/exit] \\x1b[31mred\\x9b2J" in " ".join(out.split())
    assert "\x1b[31m" not in out


@pytest.mark.parametrize("report", [{"request": 5}, {"request": {"prompt": "x"}, "checkpoint": 5}, {}])
def test_a_report_that_was_edited_is_refused_in_one_sentence(report, tmp_path_factory, refused):
    file = write(tmp_path_factory.mktemp("edited") / "a.mp4", clip_that_says(report))
    assert refused("generate", "--from", file).startswith("diptych: ")


def test_show_reads_a_report_without_a_request(tmp_path, monkeypatch, capsys):
    file = write(tmp_path / "a.mp4", clip_that_says({"request": 5}))
    monkeypatch.setattr(sys, "argv", ["diptych", "show", str(file)])
    with pytest.raises(SystemExit) as exit_:
        run()
    assert not exit_.value.code
    assert "5" in capsys.readouterr().out


def test_sigterm_leaves_no_folder_and_no_file(tmp_path):
    script = INTERRUPTED.replace("SIGINT", "SIGTERM")
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", script, "demo", "--output", str(tmp_path / "d.mp4"), "--sheet", str(tmp_path / "d.png")],
        capture_output=True, text=True, timeout=120, check=False, env=os.environ | {"TMPDIR": str(tmp_path / "tmp")},
    )  # fmt: skip
    assert done.returncode == 130, done.stderr
    assert done.stderr.strip().endswith("diptych: stopped")
    left = [path.name for path in tmp_path.rglob("*") if not path.name.startswith("torchinductor_")]  # torch's cache
    assert left == ["tmp"]
