"""Clips that start from a picture: does the first frame match it, and does the rest still follow the text?"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from diptych.bench.score import Score, judge
from diptych.bench.score_engine import SIZE
from diptych.bench.toyworld_captions import score_prompts
from diptych.engine.engine import Engine
from diptych.request import ClipRequest
from tools.toyworld.render import pictures, to_device
from tools.toyworld.tracks import collate, draw_track

BATCH = 4


def reference(model: str, count: int, out: Path | None) -> str:
    """Make `count` clips of held-out prompts, each from the first frame of a clip of its scene; returns a table."""
    result, values = Score(), []
    chosen = score_prompts(count)
    with Engine.load(model) as engine:
        for start in range(0, count, BATCH):
            some = chosen[start : start + BATCH]
            tracks = [draw_track(scene, np.random.default_rng(start + i), 1) for i, (scene, _) in enumerate(some)]
            drawn = pictures(to_device(collate(tracks), "cpu"))[:, :, 0].permute(0, 2, 3, 1)
            images = [((p + 1) * 127.5).round().byte().numpy() for p in drawn]
            requests = [
                ClipRequest(prompt, image=Image.fromarray(image), seed=start + i, **SIZE)
                for i, ((_, prompt), image) in enumerate(zip(some, images, strict=True))
            ]
            clips = engine.generate_batch(requests)
            assert clips is not None
            for (scene, prompt), image, clip in zip(some, images, clips, strict=True):
                error = np.square(clip.frames[0] / 255 - image / 255).mean()
                values.append(float(-10 * np.log10(error)))
                result.verdicts.append(judge(scene, clip, prompt))
    told = {"psnr": float(np.mean(values)), "least": min(values), "clips": count, **result.to_dict()}
    if out is not None:
        out.write_text(json.dumps(told, indent=1) + "\n")
    return f"{result.table()}\nfirst frame against the picture: {told['psnr']:.1f} dB, at least {told['least']:.1f} dB"
