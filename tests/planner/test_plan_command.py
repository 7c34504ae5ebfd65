"""`diptych plan`: quick, without torch, in words, as JSON and drawn; what cannot be is one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from tools import planning_document
from typer.testing import CliRunner

from diptych.cli.main import app
from diptych.errors import UserError
from diptych.planner import rates as rates_of_cards


def run(*arguments):
    return CliRunner().invoke(app, ["plan", *arguments])


def refusal(*arguments):
    done = run(*arguments)
    assert isinstance(done.exception, UserError), done.output
    assert not done.stdout, "told before it was refused"
    sentence = str(done.exception)
    assert "\n" not in sentence and sentence.endswith(".")
    return sentence


def test_it_imports_nothing_heavy_and_reads_headers_alone(tiny_base):
    """What keeps it below two seconds: neither torch nor a picture library is loaded, whatever is planned."""
    code = f"""
import sys
from diptych.cli.main import app
for model in ("pro", {str(tiny_base)!r}):
    try:
        app(["plan", "--gpus", "8xH100-80", "--model", model, "--clips", "3"])
    except SystemExit as end:
        assert not end.code, end.code
print([m for m in ("torch", "diffusers", "transformers", "matplotlib", "av") if m in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_it_says_what_is_best_and_why_and_how():
    done = run("--model", "pro", "--gpus", "8xH100-80", "--geometry", "864x480x125")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert lines[0].startswith("pro on 8xh100-80: 1 clip of 864x480 in 125 frames with sound, 50 steps with guidance")
    assert lines[2].startswith("Best: cfg=2,ulysses=4")
    assert any("both passes of guidance at once" in line for line in lines)
    assert any(line.strip().startswith("diptych generate") and "--layout cfg=2,ulysses=4" in line for line in lines)
    assert "Approximate, taken only by name:" in lines
    assert "Does not fit:" in lines
    assert lines[-1].startswith("Rates of h100-80: its data sheet")


def test_the_options_that_it_prints_are_those_of_generate():
    known = CliRunner().invoke(app, ["generate", "--help"], env={"COLUMNS": "200"}).stdout
    seen = set()
    for gpus, clips in (("1xT4", 1), ("1x4090", 1), ("8xH100-80", 1), ("2xH200", 1)):
        told = json.loads(run("--gpus", gpus, "--clips", str(clips), "--json").stdout)
        seen |= {option for choice in told["choices"] for option in choice["options"] if option.startswith("--")}
    assert seen == {"--layout", "--precision", "--offload", "--modulation", "--memory"}
    for option in seen:
        assert option in known, option


def test_exact_blocks_and_steps_are_planned_told_and_in_the_command():
    asked = ("--gpus", "h200", "--precision", "fp8:last=2,steps=1,first=2")
    told = json.loads(run(*asked, "--json").stdout)["best"]
    assert (told["precision"], told["exact"]) == ("fp8:steps=1,first=2,last=2", False)
    lines = run(*asked).stdout.splitlines()
    assert any("--precision fp8:steps=1,first=2,last=2" in line for line in lines)
    head, row = (next(line for line in lines if line.startswith(word)) for word in ("layout ", "single  "))
    assert row.index(" none ") + 5 == head.index(" offload") + 8, "columns stay under their names"


def test_columns_stay_under_their_names_beside_a_long_layout():
    lines = run("--gpus", "8xh100-80", "--geometry", "864x480x125").stdout.splitlines()
    head = next(line for line in lines if line.startswith("layout "))
    rows = [line for line in lines[lines.index(head) + 1 :] if line.startswith("cfg=2,")]
    assert any(len(row.split()[0]) > 22 for row in rows)
    assert {row.index(" none ") + 5 for row in rows[:6]} == {head.index(" offload") + 8}


@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (("lite-distill", "8xT4", "64x64x5"), "cards stay idle: with more it would be less than 2% faster"),
        (
            ("pro", "4xH200", "864x480x121", "--layout", "ulysses=3"),
            "1 of 4 cards stays idle: no way that fits takes more",
        ),
    ],
    ids=["slower", "asked for"],
)
def test_it_says_why_cards_stay_idle(limits, why):
    model, gpus, geometry, *more = limits
    told = run("--model", model, "--gpus", gpus, "--geometry", geometry, *more).stdout
    assert why in told


def test_the_command_that_it_prints_asks_for_what_was_planned():
    def command(*arguments):
        lines = run("--gpus", "h200", *arguments).stdout.splitlines()
        return next(line for line in lines if line.strip().startswith("diptych generate"))

    usual = command("--model", "lite")
    assert "--guidance" not in usual and "--no-audio" not in usual
    assert "--guidance 1 --no-audio" in command("--model", "lite", "--guidance", "1", "--no-audio")
    assert "--guidance" not in command("--model", "lite-distill")


def test_a_language_model_in_fewer_bits_is_planned_with_by_name():
    """Lite on a 4090 fits beside its exact text encoder only where that comes and goes; in 4 bits it stays."""
    asked = ("--model", "lite-distill", "--gpus", "1x4090")
    exact, nf4 = (json.loads(run(*asked, *more, "--json").stdout)["best"] for more in ((), ("--text-precision", "nf4")))
    assert (exact["text_precision"], exact["exact"], nf4["text_precision"], nf4["exact"]) == (
        "exact",
        True,
        "nf4",
        False,
    )
    assert (exact["offload"], nf4["offload"]) == ("model", "none")
    assert nf4["options"][:2] == ["--text-precision", "nf4"]
    assert exact["approximate"] == []


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (("--precision", "fp8:1"), "precision fp8:1 rounds products and attention scores to 8 bits"),
        (("--text-precision", "nf4"), "text precision nf4 rounds the language model's weights to 4 bits"),
        (("--text-precision", "8bit"), "text precision 8bit rounds the language model's weights to 8 bits"),
        (("--layout", "pipeline=2"), "pipeline=2 lets patches see others a step old"),
    ],
)
def test_the_words_say_what_is_given_up_as_json_does(asked, told):
    """Above the tables, which show of an approximation no more than its name."""
    lines = run("--gpus", "2xh200", *asked).stdout.splitlines()
    assert lines[2].startswith("Best, an approximation as asked for: ")
    assert f"  - an approximation: {told}" in lines
    assert lines[lines.index("Approximate, as asked for:") + 1].startswith("layout ")
    best = json.loads(run("--gpus", "2xh200", *asked, "--json").stdout)["best"]
    assert (best["exact"], best["approximate"]) == (False, [told])


@pytest.mark.parametrize("gpus", ["8xh100-pcie-80", "h200"])
def test_an_approximation_that_was_asked_for_brings_no_other_with_it(gpus):
    """On PCIe PipeFusion would be by far the fastest, on Hopper fp8: each is taken only by its own name."""
    for asked, kept in (("--precision", "fp8"), ("--text-precision", "nf4")):
        told = json.loads(run("--gpus", gpus, asked, kept, "--json").stdout)
        assert len(told["best"]["approximate"]) == 1
        faster = [way for way in told["choices"] if way["fits"] and len(way["approximate"]) > 1]
        assert min((way["seconds"]["total"] for way in faster), default=0) < told["best"]["seconds"]["total"]


def test_an_approximation_is_called_for_only_where_nothing_exact_fits():
    """Or where it was asked for, which says nothing of what else would fit."""
    asked = ("--model", "lite", "--gpus", "h200")
    assert "Best, an approximation as asked for: single, fp8:" in run(*asked, "--precision", "fp8").stdout
    tight = run(*asked, "--memory", "24GiB", "--offload", "none", "--modulation", "resident")
    assert "Only an approximation fits: single, fp8:" in tight.stdout


def test_json_has_everything(tiny_base):
    told = json.loads(run("--model", str(tiny_base), "--gpus", "2xT4", "--geometry", "64x48x9", "--json").stdout)
    assert told["model"] == str(tiny_base)
    assert (told["geometry"], told["machine"]["count"], told["machine"]["rates"]) == ("64x48x9", 2, "estimated")
    assert told["best"]["fits"] and told["best"]["reasons"]
    assert told["best"]["dtype"] == "float16"
    for choice in told["choices"]:
        seconds = choice["seconds"]
        parts = [value for name, value in seconds.items() if name != "total"]
        assert seconds["total"] == pytest.approx(sum(parts))
        assert choice["peak_bytes"]["first"] == max(p["weights"] + p["work"] for p in choice["phases"].values())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
@pytest.mark.parametrize("buffered", [True, False])
def test_standard_output_that_is_full_is_one_sentence(buffered):
    """Met while something is printed, or only when the buffer is emptied at the end."""
    command = [sys.executable, *([] if buffered else ["-u"]), "-m", "diptych", "plan", "--gpus", "t4", "--rows", "1"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "diptych: cannot write to standard output: no space left on device.\n")


def test_nothing_that_fits_is_told_with_the_status():
    done = run("--model", "pro", "--gpus", "1xT4", "--offload", "none")
    assert done.exit_code == 1
    assert "Nothing fits in 14.2 GiB." in done.stdout
    assert "needs" in done.stdout and "are there" in done.stdout


def test_it_draws_who_holds_what(tmp_path):
    for gpus, clips, tall in (("8xH200", 8, 2), ("1xT4", 1, 1)):
        file = tmp_path / f"{gpus}.png"
        done = run("--gpus", gpus, "--model", "lite", "--clips", str(clips), "--draw", str(file))
        assert done.exit_code == 0, done.output
        with Image.open(file) as picture:
            assert picture.format == "PNG"
            assert picture.size == (1210, round(110 * (4.6 + 1.35 * tall)))
            assert len(picture.convert("RGB").getcolors(1 << 24)) > 50


@pytest.mark.parametrize(
    ("arguments", "start"),
    [
        (("--gpus", "3xFOO"), "gpus = 'FOO' is not accepted: a count and a card, such as 8xH100-80; cards are"),
        (("--gpus", "t4", "--geometry", "0x0"), "geometry = '0x0' is not accepted: write WIDTHxHEIGHTxFRAMES"),
        (("--gpus", "t4", "--geometry", "4096x480x121"), "width = 4096 is not accepted"),
        (("--gpus", "t4", "--geometry", "864x480x513"), "frames = 513 is not accepted"),
        (("--gpus", "t4", "--clips", "0"), "clips = 0 is not accepted: a whole number from 1"),
        (("--gpus", "t4", "--steps", "0"), "steps = 0 is not accepted"),
        (
            ("--gpus", "t4", "--precision", "fp4"),
            "precision = 'fp4' is not accepted: exact, fp8, fp8:1 for exact attention",
        ),
        (
            ("--gpus", "h200", "--precision", "fp8:first=40,last=30"),
            "precision = 'fp8:first=40,last=30' is not accepted: first and last together at most the 60 blocks",
        ),
        (("--gpus", "t4", "--text-precision", "4bit"), "text-precision = '4bit' is not accepted: one of exact, 8bit"),
        (("--gpus", "t4", "--offload", "all"), "offload = 'all' is not accepted: one of none, model, block"),
        (("--gpus", "t4", "--modulation", "x"), "modulation = 'x' is not accepted: one of resident, tables"),
        (("--gpus", "t4", "--memory", "much"), "memory = 'much' is not accepted: a size such as 6GiB"),
        (("--gpus", "t4", "--memory", "99GiB"), "memory = '99GiB' is not accepted: at most the 15 GiB of t4"),
        (("--gpus", "t4", "--link", "0"), "link = 0.0 is not accepted"),
        (("--gpus", "t4", "--layout", "ulysses=2"), "layout ulysses=2 takes 2 GPUs, and 1xt4 has 1"),
        (("--gpus", "t4", "--layout", "sideways=2"), "layout axis 'sideways' is not accepted"),
        (("--gpus", "t4", "--rates", "/no/such"), "rates = '/no/such' is not accepted"),
        (("--gpus", "t4", "--model", "pro-distill", "--guidance", "5"), "guidance = 5.0 is not accepted"),
        (("--gpus", "t4", "--precision", "fp8"), "precision = 'fp8' is not accepted: exact on t4"),
        (("--gpus", "b200", "--precision", "fp8"), "precision = 'fp8' is not accepted: exact on b200"),
        (
            ("--gpus", "2xt4", "--layout", "ulysses=2,shard=2", "--offload", "model"),
            "offload = 'model' is not accepted",
        ),
        (("--gpus", "2xt4", "--layout", "pipeline=2", "--offload", "block"), "offload = 'block' is not accepted"),
        (("--gpus", "t4", "--memory", "0.1"), "memory = '0.1' is not accepted"),
        (("--gpus", "t4", "--memory", "9" * 400), "memory = '999"),
        (("--gpus", "t4", "--layout", "ring=" + "9" * 5000), "layout ring = '999"),
        (("--gpus", "t4", "--geometry", "9" * 5000 + "x16x1"), "geometry = '999"),
        (("--gpus", "t4", "--draw", "/no/such/plan.png"), "cannot write /no/such/plan.png: there is no folder"),
        (("--gpus", "t4", "--draw", "plan.txt"), "cannot draw to plan.txt: give a name that ends with .png"),
    ],
)
def test_what_cannot_be_is_one_sentence(arguments, start):
    assert refusal(*arguments).startswith(start)


def test_a_model_that_does_not_exist_is_one_sentence():
    with pytest.raises(UserError, match="no name of a checkpoint; did you mean lite"):
        raise run("--gpus", "t4", "--model", "litee").exception


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "{}",
        "nonsense",
        "[" * 100_000,
        '{"linear_tflops": 0, "attention_tflops": {}, "copy_TBps": 1}',
        '{"linear_tflops": 1, "attention_tflops": {"64": 1}, "copy_TBps": 1, "host_GBps": 0}',
        '{"linear_tflops": 1e-320, "attention_tflops": {"64": 1}, "copy_TBps": 1}',
        '{"linear_tflops": 1, "attention_tflops": {"64": 1}, "copy_TBps": Infinity}',
        '{"linear_tflops": 1, "attention_tflops": {"64": 1%s}, "copy_TBps": 1}' % ("0" * 400),
    ],
)
def test_rates_of_another_kind_are_refused(tmp_path, text):
    file = tmp_path / "rates.json"
    file.write_text(text)
    assert "a file that `diptych bench floors --json` wrote" in refusal("--gpus", "t4", "--rates", str(file))


def test_what_bench_floors_writes_can_be_read(tmp_path):
    file = tmp_path / "rates.json"
    arguments = ["bench", "floors", "--tiny", "--geometry", "64x32x5", "--device", "cpu", "--json", str(file)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    told = json.loads(run("--gpus", "1xT4", "--model", "lite", "--rates", str(file), "--json").stdout)
    assert told["machine"]["rates"] == "measured"
    assert told["best"]["seconds"]["denoise"] > 100_000  # a CPU


def test_measured_rates_are_used(tmp_path):
    file = tmp_path / "rates.json"
    before = json.loads(run("--gpus", "1xH200", "--model", "lite", "--json").stdout)
    attention = {str(K): share * 989.4 / 2 for K, share in rates_of_cards.ATTENTION.items()}
    rates = {"linear_tflops": 357.0, "attention_tflops": attention, "copy_TBps": 2.05}
    file.write_text(json.dumps(rates))
    after = json.loads(run("--gpus", "1xH200", "--model", "lite", "--json", "--rates", str(file)).stdout)
    slower = after["best"]["seconds"]["denoise"] / before["best"]["seconds"]["denoise"]
    assert slower == pytest.approx(2, rel=0.03)  # all but the kernels' starts takes twice as long
    assert after["machine"]["rates"] == "measured"


def test_the_document_is_what_the_code_says():
    text = planning_document.DOCUMENT.read_text()
    assert planning_document.rendered(text) == text, "stale: run python tools/planning_document.py"
