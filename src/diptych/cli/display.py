"""Progress on the terminal: one line a stage, on standard error, so that standard output stays for results."""

from __future__ import annotations

import json
import re
import sys
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.text import Text

from diptych.engine.progress import Progress

_LABELS = {
    "download": "Download",
    "load": "Load",
    "text": "Read the text",
    "image": "Read the image",
    "denoise": "Denoise",
    "decode": "Decode",
    "mux": "Write",
}


class _Left(TextColumn):
    """Time left in the stage as the engine estimates it, and nothing when the stage is over."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: object) -> Text:
        left = getattr(task, "fields", {}).get("left")
        return Text("" if left is None else f"{left:.0f} s left", style="progress.remaining")


class Display:
    """Context manager; call it with each `Progress`. Quiet: tells what failed, and nothing else."""

    def __init__(self, *, quiet: bool = False) -> None:
        self.console = Console(stderr=True)
        self._quiet = quiet
        self._bars = Bars(
            TextColumn("{task.description:<15}"),
            BarColumn(bar_width=32),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            _Left(),
            console=self.console,
            disable=quiet,
        )
        self._tasks: dict[str, TaskID] = {}
        self._started = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._started:  # bars that never started would leave an empty line before a refusal
            self._bars.stop()

    def __call__(self, progress: Progress) -> None:
        if not self._started:
            self._bars.start()
            self._started = True
        if progress.stage not in self._tasks:
            self._tasks[progress.stage] = self._bars.add_task(_LABELS[progress.stage], total=progress.total, left=None)
        task = self._tasks[progress.stage]
        left = progress.left if progress.done < progress.total else None
        self._bars.update(task, completed=progress.done, total=progress.total, left=left)

    def restart(self) -> None:
        """Forget the stages of the clip before, so that the next one gets lines of its own."""
        for task in self._tasks.values():
            self._bars.stop_task(task)
        self._tasks.clear()

    def say(self, sentence: str) -> None:
        if not self._quiet:
            self.warn(sentence)

    def warn(self, sentence: str) -> None:
        """Of what failed while the rest goes on: also told where nobody wants to see progress."""
        self.console.print(visible(sentence), highlight=False, markup=False, soft_wrap=True)


def visible(text: str) -> str:
    """Control characters as escapes: a prompt or a file's name cannot move the cursor or colour the terminal."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", lambda found: f"\\x{ord(found[0]):02x}", text)


def print_json(value: Any, indent: int | None = None) -> None:
    """On standard output; with escapes where that is no UTF-8, so that it is JSON whatever the locale."""
    unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    print(json.dumps(value, ensure_ascii=not unicode, indent=indent))
