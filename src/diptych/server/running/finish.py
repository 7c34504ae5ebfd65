"""From a clip in memory to files that may be called finished: checked, written, read back, with previews."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import av

from diptych.errors import ClipError, MediaError
from diptych.media import sheets
from diptych.media.clip import Clip
from diptych.media.film import Film
from diptych.request import ResolvedRequest
from diptych.server.running.messages import Run


class OutputInvalid(Exception):  # noqa: N818 - an answer, not an error
    """What the engine made is not what was asked for; `str` says how."""


def finish(clip: Clip, asked: ResolvedRequest, run: Run, index: int, film: Film) -> dict[str, Any]:
    """Check `clip`, write it as `<index>.mp4` with pictures of it, and read the file back. Returns its report.

    film: has the clip's frames already.
    Raises `OutputInvalid` for a clip or file that must not be shown as finished, `OSError` for a full disk.
    """
    try:
        clip.check(asked)
    except ClipError as error:
        raise OutputInvalid(f"The clip was refused: {error}") from None
    path = run.folder / f"{index}.mp4"
    try:
        film.save(path, clip)
    except MediaError as error:
        raise OSError(getattr(error.__cause__, "errno", None) or errno.EIO, str(error)) from error
    check_file(path, asked)
    if index == 0:
        sheets.thumbnail(clip).save(run.folder / "thumbnail.webp", quality=82)
        sheets.sprite_sheet(clip).save(run.folder / "spritesheet.jpg", quality=82)
        if clip.audio is not None:
            sheets.waveform(clip.audio).save(run.folder / "waveform.png")
    return clip.report


def check_file(path: Path, asked: ResolvedRequest) -> None:
    """Hold the tracks of a written file against the request, packet by packet. Raises `OutputInvalid`."""
    with av.open(str(path)) as container:
        video = container.streams.video[0]
        sounds = container.streams.audio
        frames = sum(1 for packet in container.demux(video) if packet.size)
        seconds = asked.frames / asked.fps
        found = (video.width, video.height, frames)
        if found != (asked.width, asked.height, asked.frames):
            raise OutputInvalid(f"The file holds {found}, not the size and frames asked for.")
        if bool(sounds) != asked.request.audio:
            raise OutputInvalid("The file has no sound." if asked.request.audio else "The file has a sound track.")
        for track in (video, *sounds):
            lasts = float((track.duration or 0) * (track.time_base or 0))
            if abs(lasts - seconds) > 1 / asked.fps + 1e-3:
                raise OutputInvalid(f"The {track.type} track lasts {lasts:.3f} s instead of {seconds:.3f} s.")


def write_result(folder: Path, reports: list[dict[str, Any]], peak_mb: float | None) -> dict[str, Any]:
    """What a restart needs to complete the job without the engine: result.json, written last, and synced."""
    stages: dict[str, float] = {}
    for report in reports:
        for stage, seconds in (report.get("seconds") or {}).items():
            if isinstance(seconds, int | float):
                stages[stage] = stages.get(stage, 0.0) + float(seconds)
    notes = sorted({str(note) for r in reports for note in r.get("notes", [])})
    result = {
        "inference_time_s": round(sum(stages.values()), 3),
        "stage_durations": {k: round(v, 3) for k, v in stages.items()},
        "peak_memory_mb": peak_mb,
        "warnings": [*(["prompt_truncated"] if any(n.startswith("prompt cut") for n in notes) else []), *notes],
        "metrics": {"outputs": reports},
    }
    with (folder / "result.json").open("w", encoding="utf-8") as file:
        json.dump(result, file, default=str)
        file.flush()
        os.fsync(file.fileno())
    return result
