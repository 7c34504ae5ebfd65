"""The files for operators: they name what exists, and as much of them is run as can be without a container."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import generate_latest
from tests.server.serving import Serving

from diptych.server.metrics import Metrics
from diptych.server.settings import Settings, SettingsError, load

ROOT = Path(__file__).resolve().parent.parent.parent
DEPLOY = ROOT / "deploy"


def test_the_dashboard_asks_for_metrics_that_the_server_has() -> None:
    text = generate_latest(Metrics().registry).decode()
    have = set(re.findall(r"^# TYPE (\w+) ", text, re.MULTILINE))
    board = json.loads((DEPLOY / "grafana.json").read_text())
    asked = {
        name for panel in board["panels"] for t in panel["targets"] for name in re.findall(r"diptych_\w+", t["expr"])
    }
    assert {name.removesuffix("_bucket") for name in asked} <= have
    counters = {name for name in have if not name.endswith("_created")} - {"diptych_http_answers_total"}
    shown = {n.removesuffix("_bucket") for n in asked}
    assert counters - shown <= {"diptych_jobs", "diptych_cancel_seconds", "diptych_output_rejected_total"}


def test_settings_named_in_deployment_files_and_documents_exist() -> None:
    text = "".join((DEPLOY / f).read_text() for f in ("Dockerfile", "compose.yaml", "diptych.service"))
    names = {n.lower() for n in re.findall(r"DIPTYCH_([A-Z_]+)", text)}
    assert names - {"config"} <= set(Settings.model_fields)
    documents = [ROOT / "docs" / f for f in ("serving.md", "operating.md", "security.md")]
    for document in documents:
        for flag in re.findall(r"`--([a-z0-9-]+)", document.read_text()):
            assert flag.removeprefix("no-").replace("-", "_") in Settings.model_fields or flag in OTHER_FLAGS, flag


OTHER_FLAGS = {"rate", "output", "url", "field", "image", "size", "seconds", "steps", "seed", "variant", "help"}


def test_every_setting_is_told_in_a_document() -> None:
    text = "".join((ROOT / "docs" / f).read_text() for f in ("serving.md", "operating.md", "security.md"))
    missing = [n for n in Settings.model_fields if n != "checkpoint" and "--" + n.replace("_", "-") not in text]
    assert missing == []


def dockerfile() -> list[tuple[str, str]]:
    """Instructions with what follows them."""
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines if line and not line.startswith("#")]


def words_of(name: str) -> list[str]:
    """The words of ENTRYPOINT, CMD or the health check's CMD."""
    found = next(rest for word, rest in dockerfile() if word == name)
    return [str(word) for word in json.loads(found[found.index("[") :])]


def image_environment() -> dict[str, str]:
    return dict(word.split("=", 1) for name, rest in dockerfile() if name == "ENV" for word in shlex.split(rest))


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return found


def test_the_server_takes_what_image_and_compose_file_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = compose()["services"]["diptych"]
    for name, value in (image_environment() | service["environment"]).items():
        if name.startswith("DIPTYCH_"):
            monkeypatch.setenv(name, re.sub(r"\$\{POSTGRES_PASSWORD:\?[^}]*\}", "secret", value))
    assert words_of("ENTRYPOINT")[-2:] == ["diptych", "serve"]
    with pytest.raises(SettingsError, match="keys"):  # of the secret that is not there
        load(words_of("CMD"))
    (tmp_path / "keys").write_text("ann=ann-secret-1\n")
    monkeypatch.setenv("DIPTYCH_API_KEY_FILE", str(tmp_path / "keys"))
    settings = load(words_of("CMD"))
    keys = settings.keys()
    assert (settings.host, [key.name for key in keys]) == ("0.0.0.0", ["ann"])
    assert settings.database_url() == "postgresql+psycopg://diptych:secret@database/diptych"
    assert settings.drain_timeout < float(service["stop_grace_period"].removesuffix("s"))
    mounted = {volume.split(":")[1] for volume in service["volumes"]}
    assert {str(settings.state_dir), image_environment()["HF_HOME"]} == mounted


def test_the_image_alone_listens_to_nobody_without_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in image_environment().items():
        if name.startswith("DIPTYCH_"):
            monkeypatch.setenv(name, value)
    with pytest.raises(SettingsError, match=r"0\.0\.0\.0 is reached by others; set an api_key"):
        load(words_of("CMD"))


def test_what_the_image_copies_makes_the_whole_package(tmp_path: Path) -> None:
    source = tmp_path / "src"
    for name, rest in dockerfile():
        if name == "COPY":
            *files, target = [word for word in rest.split() if not word.startswith("--")]
            for file in files:
                at = tmp_path / target.removeprefix("/")
                if (ROOT / file).is_dir():
                    shutil.copytree(ROOT / file, at, ignore=shutil.ignore_patterns("__pycache__"))
                else:
                    at.mkdir(exist_ok=True)
                    shutil.copy(ROOT / file, at)
    pip = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path)]
    subprocess.run([*pip, str(source)], check=True, capture_output=True, text=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        packed = {name for name in wheel.namelist() if name.startswith("diptych/")}
    package = source / "src"
    assert packed == {str(file.relative_to(package)) for file in package.rglob("*") if file.is_file()}
    assert "diptych/server/studio/index.html" in packed


@pytest.mark.server
def test_the_health_check_tells_a_server_that_is_ready_from_none(served: Serving) -> None:
    python, *rest = words_of("HEALTHCHECK")
    assert python == "python3"
    for address, status in ((served.url.removeprefix("http://"), 0), ("127.0.0.1:9", 1)):
        command = [sys.executable, *(word.replace("127.0.0.1:8000", address) for word in rest)]
        assert subprocess.run(command, capture_output=True).returncode == status


def test_triton_finds_a_compiler_in_the_image_and_nothing_runs_as_root() -> None:
    steps = dockerfile()
    installed = next(rest for name, rest in steps if name == "RUN" and "apt-get install" in rest).split()
    assert {"gcc", "libc6-dev", "python3-dev"} <= set(installed)
    order = [name for name, _ in steps]
    assert ("USER", "diptych") in steps
    assert order.index("USER") < order.index("ENTRYPOINT")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_understands_every_line_of_the_unit(tmp_path: Path) -> None:
    text = (DEPLOY / "diptych.service").read_text()
    installed = re.sub(r"^ExecStart=\S+/diptych ", f"ExecStart={shutil.which('true')} ", text, flags=re.MULTILINE)
    assert installed != text
    unit = tmp_path / "diptych.service"
    for content, good in ((installed, True), (installed.replace("KillMode=mixed", "KillMode=some"), False)):
        unit.write_text(content)
        done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
        assert (str(unit) not in done.stderr) == good, done.stderr
