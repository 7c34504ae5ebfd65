"""The files for operators name what exists: metrics, settings, paths."""

from __future__ import annotations

import json
import re
from pathlib import Path

import yaml
from prometheus_client import generate_latest

from diptych.server.metrics import Metrics
from diptych.server.settings import Settings

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


def test_the_compose_file_and_the_unit_are_well_formed() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    assert set(compose["services"]) == {"diptych", "database"}
    unit = (DEPLOY / "diptych.service").read_text()
    assert "TimeoutStopSec" in unit
    assert re.search(r"^ExecStart=\S+/diptych serve ", unit, re.MULTILINE)


def test_the_image_runs_as_a_user_and_is_checked_for_health() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    assert re.search(r"^USER diptych$", text, re.MULTILINE)
    assert "HEALTHCHECK" in text
    assert "/readyz" in text
