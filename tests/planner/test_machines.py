"""Cards by name, machines by text or by what nvidia-smi shows."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from diptych.cli.main import app
from diptych.errors import RequestError
from diptych.planner.cards import CARDS, GIB, card_named, card_shown
from diptych.planner.machine import machine_here, machine_of, read_smi

SMI = """\
0, GPU-1a2b, NVIDIA H100 80GB HBM3, 81559, 570.86, 9.0
1, GPU-3c4d, NVIDIA H100 80GB HBM3, 81559, 570.86, 9.0
2, GPU-5e6f, NVIDIA H100 80GB HBM3, 81559, 570.86, 9.0
"""


@pytest.mark.parametrize(
    ("text", "count", "card"),
    [
        ("8xH100-80", 8, "h100-80"),
        ("8 x h100", 8, "h100-80"),
        ("2×T4", 2, "t4"),
        ("RTX 4090", 1, "4090"),
        ("4*NVIDIA H200", 4, "h200"),
        ("1xgeforce rtx 3090", 1, "3090"),
    ],
)
def test_a_machine_is_a_count_and_a_card(text, count, card):
    machine = machine_of(text)
    assert (machine.count, machine.card.name) == (count, card)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("3xFOO", r"gpus = 'FOO' is not accepted: a count and a card, such as 8xH100-80; cards are t4, .*b200\.$"),
        ("2xH100-81", "the nearest card is h100-80"),
        ("0xT4", r"gpus = '0xT4' is not accepted: 1 to 16 cards of one kind, as one host has\.$"),
        ("17xT4", "1 to 16 cards"),
        ("999999999xT4", "gpus = '999999999xT4' is not accepted"),
        ("8xH100,2xT4", "a count and a card"),
        ("", "a count and a card"),
        ("-1xT4", "gpus = "),
    ],
)
def test_other_machines_are_refused_in_one_sentence(text, sentence):
    with pytest.raises(RequestError, match=sentence):
        machine_of(text)


def test_every_card_has_rates_in_their_order_and_a_source():
    for card in CARDS.values():
        assert card.fp8 is None or card.fp8 == pytest.approx(2 * card.half, rel=0.02), card.name
        assert (card.fp8 is not None) == (card.capability >= (8, 9)), card.name
        assert card.nvlink is None or card.nvlink > card.bus
        assert 0 < card.usable < card.memory * GIB
        assert card.source
        assert card_named(card.name) is card


@pytest.mark.parametrize(
    ("shown", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-80"),
        ("NVIDIA H100 PCIe", "h100-pcie-80"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "4090"),
        ("NVIDIA RTX 6000 Ada Generation", "6000-ada"),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA H200", "h200"),
    ],
)
def test_a_card_is_known_by_the_name_that_its_driver_shows(shown, name):
    assert card_shown(shown) is CARDS[name]


def test_a_name_that_no_card_has_is_none():
    assert card_shown("NVIDIA H1000") is None


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 3), ("0,2", 2), ("", 0), ("-1", 0), ("1,7,0", 1), ("GPU-3c4d", 1), ("GPU-3c,GPU-5", 2)],
)
def test_hidden_gpus_are_not_counted(visible, count):
    """CUDA reads CUDA_VISIBLE_DEVICES up to the first that it does not know; a UUID may be cut short."""
    assert len(read_smi(SMI, visible)) == count


def test_the_machine_here_has_the_memory_that_its_driver_shows():
    machine = machine_here(read_smi(SMI, None))
    assert (machine.count, machine.card.name, machine.found) == (3, "h100-80", True)
    assert machine.card.memory == pytest.approx(81559 / 1024)


def test_lines_that_nvidia_smi_cannot_fill_are_passed_over():
    assert read_smi("0, GPU-1, NVIDIA X, [N/A], 570, 9.0\nFailed to initialize NVML\n", None) == []


@pytest.mark.parametrize(
    ("smi", "sentence"),
    [
        ("", r"^gpus is missing: no NVIDIA GPU is found here; say which to plan for, such as --gpus 1x4090\.$"),
        (SMI + "3, GPU-9, Tesla T4, 15360, 570.86, 7.5\n", "several kinds are planned one at a time"),
        ("0, GPU-1, NVIDIA Z1, 15360, 570.86, 7.5\n", "not in the table; name the nearest card"),
    ],
)
def test_a_machine_that_cannot_be_planned_for_says_what_to_do(smi, sentence):
    with pytest.raises(RequestError, match=sentence):
        machine_here(read_smi(smi, None))


def test_the_example_that_a_refusal_gives_works():
    with pytest.raises(RequestError) as refused:
        machine_here([])
    words = str(refused.value).split()
    example = words[words.index("--gpus") :]
    example[-1] = example[-1].rstrip(".")
    done = CliRunner().invoke(app, ["plan", *example])
    assert done.exit_code == 0 and done.stdout.startswith(f"pro on {example[1]}: ")
