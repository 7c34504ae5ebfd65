"""Every option that takes a number refuses what it cannot take in the one sentence of ours, whoever finds out."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest
import typer

from diptych.cli.main import app, run

NEEDED = {
    "generate": ["a kite"], "show": ["no.mp4"], "trace": ["no"], "calibrate": ["no"], "tune": ["no"],
    "compare": ["no.mp4", "no.mp4"], "client submit": ["a kite"], "client watch": ["no"], "client download": ["no"],
    "client cancel": ["no"], "client delete": ["no"], "bench attention": ["--world", "2"], "bench clip": ["no"],
    "bench load": ["no"], "checkpoint tiny": ["no"], "checkpoint inspect": ["no"],
}  # fmt: skip
"""What a command cannot do without."""

BOUNDED = [
    ("score --prompts 0", "--prompts = 0 is not accepted: a whole number from 1 to 1,000."),
    ("score --prompts 1001", "--prompts = 1001 is not accepted: a whole number from 1 to 1,000."),
    ("score --seeds -1", "--seeds = -1 is not accepted: a whole number from 1 to 1,000."),
    ("score --batch 65", "--batch = 65 is not accepted: a whole number from 1 to 64."),
    ("score --least 101", "--least = 101.0 is not accepted: a number from 0 to 100."),
    ("score --least nan", "--least = nan is not accepted: a number from 0 to 100."),
    ("plan --gpus t4 --rows 0", "--rows = 0 is not accepted: a whole number from 1 on."),
    *(
        (f"bench {command} --repeats 0", "--repeats = 0 is not accepted: a whole number from 1 on.")
        for command in ("forward", "step", "decode", "clip no", "load no", "attention --world 2")
    ),
    *(
        (f"bench {command} --text {text}", f"--text = {text} is not accepted: a whole number from 1 to 1,024.")
        for command, text in (("forward", 0), ("step", -1), ("attention --world 2", 1025))
    ),
    ("bench attention --world 2 --link inf", "--link = inf is not accepted: a number from 0.001 on."),
    ("bench attention --world 2 --world 0", "--world = 0 is not accepted: a whole number from 1 on."),
    ("bench attention --world 2 --link 0", "--link = 0.0 is not accepted: a number from 0.001 on."),
    ("bench decode --budget 0", "--budget = 0.0 is not accepted: a number from 0.1 on."),
    ("bench decode --budget nan", "--budget = nan is not accepted: a number from 0.1 on."),
]


def commands(group: typer.Typer, path: str = "") -> Iterator[tuple[str, Any]]:
    for command in group.registered_commands:
        assert command.callback is not None
        yield path + (command.name or command.callback.__name__), command.callback
    for inner in group.registered_groups:
        assert inner.typer_instance is not None
        yield from commands(inner.typer_instance, f"{path}{inner.name} ")


def options() -> Iterator[tuple[str, str, Any, Any]]:
    """Command, option, its type and what typer was told of it."""
    for name, callback in commands(app):
        for parameter, hint in get_type_hints(callback, include_extras=True).items():
            if get_origin(hint) is Annotated:
                kind, info = get_args(hint)[:2]
                flag = next((text for text in info.param_decls or () if text.startswith("--")), None)
                yield name, flag or "--" + parameter.replace("_", "-"), kind, info


def leaves(kind: Any) -> set[Any]:
    """The types that a type is made of."""
    return {leaf for part in get_args(kind) for leaf in leaves(part)} or {kind}


def number(kind: Any) -> type | None:
    """Which number an option takes, alone, in a list or not at all."""
    return next((one for one in (int, float) if one in leaves(kind)), None)


NUMBERS = [(name, flag, number(kind)) for name, flag, kind, _ in options() if number(kind) is not None]


def refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: list[str]) -> str:
    """What the command said, having refused in one sentence and nothing else."""
    monkeypatch.setattr(sys, "argv", ["diptych", *words])
    with pytest.raises(SystemExit) as end:
        run()
    out, said = capsys.readouterr()
    assert (end.value.code, out) == (2, "")
    assert said.startswith("diptych: ") and said.count("\n") == 1 and said.endswith(".\n")
    return said.removeprefix("diptych: ").strip()


def test_there_are_numbers_in_every_kind_of_command():
    assert {("score", "--prompts", int), ("generate", "--fps", float), ("bench attention", "--world", int)} <= set(
        NUMBERS
    )
    assert len(NUMBERS) > 50


@pytest.mark.parametrize(("command", "flag", "kind"), NUMBERS, ids=lambda value: str(value))
def test_what_is_no_number(command, flag, kind, capsys, monkeypatch):
    words = [*command.split(), *NEEDED.get(command, []), flag, "many"]
    accepted = "a whole number" if kind is int else "a number"
    assert refusal(capsys, monkeypatch, words) == f"{flag} = 'many' is not accepted: {accepted}."


@pytest.mark.parametrize(("line", "told"), BOUNDED, ids=[line for line, _ in BOUNDED])
def test_a_number_out_of_range(line, told, capsys, monkeypatch):
    assert refusal(capsys, monkeypatch, line.split()) == told


def test_no_range_is_left_to_typer():
    """Nor a choice, nor a file that must exist: its own refusals are boxes of several lines."""
    for command, flag, kind, info in options():
        told = {
            name: getattr(info, name, None) for name in ("min", "max", "click_type", "parser", "exists", "callback")
        }
        assert all(value in (None, False) for value in told.values()), (command, flag, told)
        assert leaves(kind) <= {int, float, str, bool, Path, type(None)}, (command, flag)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("generate --nope", "no such option: --nope"),
        ("show", "missing argument"),
        ("show a b", "got unexpected extra argument"),
        ("generate --steps", "option '--steps' requires an argument"),
        ("nonsense", "no such command 'nonsense'"),
    ],
)
def test_what_typer_itself_refuses(line, told, capsys, monkeypatch):
    assert refusal(capsys, monkeypatch, line.split()).startswith(told)


@pytest.mark.parametrize("command", sorted({name for name, _ in commands(app)} - {"serve"}))
def test_no_help_is_cut_off_in_a_terminal_of_80_columns(command, capsys, monkeypatch):
    """A word that is wider than its column ends with an ellipsis; what it held nobody learns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys, "argv", ["diptych", *command.split(), "--help"])
    with pytest.raises(SystemExit):
        run()
    out, _ = capsys.readouterr()
    assert "Usage: " in out and re.findall(r"\S+…", out) == []


@pytest.mark.parametrize("line", ["", "bench", "client"])
def test_a_group_without_a_command_shows_its_help(line, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["diptych", *line.split()])
    with pytest.raises(SystemExit) as end:
        run()
    out, said = capsys.readouterr()
    assert end.value.code == 2 and "Usage: " in out and "Commands" in out and said == ""
