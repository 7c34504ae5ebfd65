"""The log: one line an event, each with the id of its request; prompts stay out of it unless asked for."""

from __future__ import annotations

import json
import logging
import sys
import time

from diptych.server.gate import request_id
from diptych.server.settings import Settings


class _Line(logging.Formatter):
    def __init__(self, as_json: bool) -> None:
        super().__init__("%(asctime)s %(levelname)-7s [%(request)s] %(name)s: %(message)s")
        self.as_json = as_json
        self.converter = time.gmtime

    def format(self, record: logging.LogRecord) -> str:
        record.__dict__["request"] = request_id.get()
        if not self.as_json:
            return super().format(record)
        line = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "request_id": request_id.get(),
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(settings: Settings) -> None:
    """Log to stderr as the settings say."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Line(settings.log_json))
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler], force=True)
    for noisy in ("alembic", "uvicorn.error", "PIL"):
        logging.getLogger(noisy).setLevel(max(logging.WARNING, logging.getLogger().level))
