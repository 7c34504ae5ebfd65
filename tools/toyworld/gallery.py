"""What a model makes, to look at: sheets of frames and waveforms, and a small moving picture."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from diptych.bench.score_engine import SIZE
from diptych.bench.toyworld_captions import score_prompts
from diptych.engine.engine import Engine
from diptych.media.clip import Clip
from diptych.media.sheets import waveform
from diptych.request import ClipRequest
from tools.toyworld.preview import rows

BATCH, ROWS, COLUMNS = 4, 6, 4
_PAPER = (24, 25, 29)


def gallery(folder: Path, model: str, count: int, seed: int) -> list[Path]:
    """Clips of held-out prompts, every motion in turn: sheets of `ROWS` clips each, and the first ones moving."""
    order = score_prompts(64)
    motions = list(dict.fromkeys(scene.motion for scene, _ in order))
    turns = [[p for scene, p in order if scene.motion == motion] for motion in motions]
    prompts = [turn[i] for i in range(-(-count // len(turns))) for turn in turns][:count]
    clips: list[Clip] = []
    with Engine.load(model) as engine:
        for start in range(0, count, BATCH):
            some = prompts[start : start + BATCH]
            made = engine.generate_batch([ClipRequest(p, seed=seed, **SIZE) for p in some])
            assert made is not None
            clips += made
    folder.mkdir(parents=True, exist_ok=True)
    sheets = []
    for start in range(0, count, ROWS):
        path = folder / f"clips-{1 + start // ROWS}.png"
        sheets.append(rows(path, clips[start : start + ROWS], prompts[start : start + ROWS]))
    return [*sheets, moving(folder / "clips.webp", clips[: 2 * COLUMNS])]


def moving(path: Path, clips: Sequence[Clip]) -> Path:
    """The clips side by side, twice as large, each over its waveform, as an animated WebP; every other frame."""
    wide, tall, wave, gap = 2 * clips[0].width, 2 * clips[0].height, 40, 8
    lines = -(-len(clips) // COLUMNS)
    size = (COLUMNS * (wide + gap) + gap, lines * (tall + wave + 2 * gap) + gap)
    waves = [None if clip.audio is None else waveform(clip.audio, wide, wave) for clip in clips]
    pictures = []
    for index in range(0, len(clips[0].frames), 2):
        sheet = Image.new("RGBA", size, (*_PAPER, 255))
        for place, (clip, sound) in enumerate(zip(clips, waves, strict=True)):
            left = gap + place % COLUMNS * (wide + gap)
            top = gap + place // COLUMNS * (tall + wave + 2 * gap)
            frame = Image.fromarray(clip.frames[index]).resize((wide, tall), Image.Resampling.BICUBIC)
            sheet.paste(frame, (left, top))
            if sound is not None:
                sheet.alpha_composite(sound, (left, top + tall + gap // 2))
                at = left + round(index / (len(clip.frames) - 1) * (wide - 1))
                sheet.paste((255, 255, 255, 255), (at, top + tall + gap // 2, at + 1, top + tall + gap // 2 + wave))
        pictures.append(sheet.convert("RGB"))
    milliseconds = round(2000 / clips[0].fps)
    pictures[0].save(path, save_all=True, append_images=pictures[1:], duration=milliseconds, loop=0, quality=60)
    return path


_PANELS = (
    ("video", "psnr", "video VAE: PSNR, dB (training clips)"),
    ("vocoder", "error", "vocoder: RMS error of samples"),
    ("flow", "video", "transformer: error of the picture's velocity"),
    ("flow", "audio", "transformer: error of the sound's velocity"),
)


def curves(path: Path, logs: Sequence[Path]) -> Path:
    """Draw what stages logged, one after the other: every line of the files that is a JSON object."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(_PANELS), figsize=(4 * len(_PANELS), 3.2), layout="constrained")
    for axis, (stage, name, title) in zip(axes, _PANELS, strict=True):
        before = 0.0
        for log in logs:
            lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
            lines = [line for line in lines if line.get("stage") == stage]
            if stage == "video":
                lines = [line | {"psnr": -10 * np.log10(line["mse"] / 4)} if "mse" in line else line for line in lines]
            points = [line for line in lines if name in line and "seconds" in line]
            if points:
                axis.plot([before + p["seconds"] for p in points], [p[name] for p in points])
                before += points[-1]["seconds"]
            ends = [line[name] for line in lines if name in line and "seconds" not in line]
            axis.plot([before] * len(ends), ends, "*", color="#d83030", markersize=11)
        axis.set_title(title, fontsize=10)
        axis.set_xlabel("seconds of training")
        axis.grid(alpha=0.3)
        if name != "psnr":
            axis.set_yscale("log")
    figure.savefig(path, dpi=80)
    plt.close(figure)
    return path
