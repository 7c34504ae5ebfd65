"""`diptych doctor` tells what is there, and one thing to do about each lack; machines are those described here."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from importlib import metadata

import pytest
from typer.testing import CliRunner

from diptych.cli.main import app
from diptych.engine import doctor
from diptych.planner.cards import GIB
from diptych.planner.machine import Gpu

H100 = Gpu("NVIDIA H100 80GB HBM3", 80 * GIB, "570.86", (9, 0))
T4 = Gpu("Tesla T4", 15 * GIB, "570.86", (7, 5))
TOPOLOGY = """\
        GPU0    GPU1    NIC0    CPU Affinity
GPU0     X      {0}     SYS     0-31
GPU1    {0}      X      NV9     0-31
NIC0    SYS     SYS      X
"""


def named(checks, name):
    return [check for check in checks if check.name == name]


def test_here_clips_can_be_made():
    """The tests run here, so they can: and exactly the lacks have something to do."""
    checks = doctor.examine()
    assert doctor.can_generate(checks)
    for check in checks:
        assert (check.todo is None) == (check.state == "ok"), check
        assert "\n" not in check.found + (check.todo or "")


def test_the_command_prints_a_line_each_and_ends_with_the_verdict():
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 0
    assert "ok   torch: " in done.stdout
    assert done.stdout.rstrip().endswith("Clips can be made here.")
    told = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert told["can_generate"] is True
    assert {"name", "state", "found", "todo"} == set(told["checks"][0])


def test_a_package_that_is_missing_or_too_old_stops_it(monkeypatch):
    real = metadata.version

    def version(name):
        if name == "av":
            raise metadata.PackageNotFoundError(name)
        return "0.30.0" if name == "diffusers" else real(name)

    monkeypatch.setattr(doctor.metadata, "version", version)
    done = CliRunner().invoke(app, ["doctor"])
    assert done.exit_code == 1
    assert re.search(r"BAD  av: not installed\n       pip install 'av>=\d+'\n", done.stdout)
    assert "BAD  diffusers: 0.30.0\n       pip install 'diffusers~=0.42.1'" in done.stdout
    assert "Clips cannot be made here" in done.stdout


def test_a_package_that_cannot_be_imported_stops_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    (check,) = named(doctor.packages(), "av")
    assert check.state == "bad" and "cannot be imported" in check.found


def test_gpus_that_torch_does_not_see_are_told(monkeypatch):
    (check,) = named(doctor.devices([H100]), "gpus")
    assert check.state == "note"
    assert check.found.startswith("NVIDIA H100 80GB HBM3 (80 GiB), but torch sees none")


def test_an_old_card_says_which_dtype_is_taken(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    checks = list(doctor.devices([T4]))
    assert named(checks, "gpus")[0].state == "ok"
    assert "float16 is taken" in named(checks, "dtype")[0].todo
    assert not named(checks, "card")
    assert named(doctor.devices([Gpu("NVIDIA Z9", GIB, "1", (13, 0))]), "card")


def test_hopper_without_its_kernel_says_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", None)
    (check,) = named(doctor.kernels([H100]), "fa3_fwd_interface")
    assert check.state == "note" and "pip install 'diptych[hopper]'" in check.todo
    assert not named(doctor.kernels([T4]), "fa3_fwd_interface")
    monkeypatch.setattr("diptych.attention.cores.gluon_refusal", lambda: "Triton 4.0.0 is another")
    (check,) = named(doctor.kernels([H100]), "gluon")
    assert (check.state, check.found) == ("note", "Triton 4.0.0 is another: no attention without a maximum, no int8")
    assert not named(doctor.kernels([T4]), "gluon")
    assert not list(doctor.kernels([]))


@pytest.mark.parametrize(("cell", "kinds"), [("NV18", {"NV18"}), ("PHB", set()), ("SYS", set())])
def test_links_are_read_between_gpus_alone(cell, kinds):
    """A network card that hangs on NVLink is no link between GPUs."""
    assert doctor.read_topology(TOPOLOGY.format(cell)) == kinds


def test_no_drawing_is_no_answer(monkeypatch):
    assert doctor.read_topology("No devices were found\n") is None
    monkeypatch.setattr(doctor, "topology", lambda: None)
    assert named(doctor.links([H100, H100]), "links")[0].state == "note"
    monkeypatch.setattr(doctor, "topology", set)
    assert "cfg=2" in named(doctor.links([T4, T4]), "links")[0].todo
    assert not list(doctor.links([H100]))


def test_a_taken_port_is_told():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        one.listen()
        port = one.getsockname()[1]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(doctor, "SERVER_PORT", port)
            (check,) = doctor.ports()
    assert check.found == f"{port} is taken"


def test_a_token_is_never_told(monkeypatch):
    secret = "hf_abcdefghijklmnop"
    monkeypatch.setenv("HF_TOKEN", secret)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    checks = doctor.examine()
    assert named(checks, "hub token")[0].found == "there"
    assert secret not in repr(checks)
    assert secret not in CliRunner().invoke(app, ["doctor", "--json"]).stdout
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    assert "accept its terms" in named(doctor.hub(), "hub token")[0].todo


def test_what_is_in_the_cache_is_found(tmp_path, monkeypatch):
    home = (
        tmp_path / "models--kandinskylab--Kandinsky-6.0-Lite-distill-5s-Diffusers" / "snapshots" / "abc" / "transformer"
    )
    home.mkdir(parents=True)
    assert doctor.downloaded(tmp_path) == set()
    (home / "diffusion_pytorch_model.safetensors").write_bytes(b"")
    assert doctor.downloaded(tmp_path) == {"lite-distill"}


def test_a_full_disk_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "cache_folder", lambda: tmp_path / "not" / "yet")
    usage = doctor.shutil.disk_usage(tmp_path)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage._replace(free=5_000_000_000))
    (check,) = named(doctor.disk(), "disk")
    assert check.state == "note" and check.found.startswith("5 GB free")


def test_a_failing_nvidia_smi_is_no_gpu(monkeypatch):
    def broken(*arguments, **more):
        raise subprocess.CalledProcessError(9, "nvidia-smi")

    monkeypatch.setattr(subprocess, "run", broken)
    assert doctor.gpus_here() == []
    assert doctor.topology() is None
