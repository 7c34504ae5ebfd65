"""What fp8 costs a model that was trained: the demo model's own queries, keys and values, and whole clips judged.

    python benchmarks/fp8_trained.py OUT.json [--prompts 12] [--steps 20] [--device cuda]

Attention in int8 is played in float32: queries and keys are rounded as `diptych.attention.int8` rounds them. On a GPU
with that kernel it also runs itself, the demo model's heads of 32 filled up to 128 with zeros. Errors are relative,
against attention on the same tensors in float32, at every block of every few steps of both lanes. Beside them: what it
costs to round the results of attention to text and sound to e4m3, with one scale or one a row. Clips of held-out
prompts are judged as `diptych score` judges them and held against the exact clips of their seeds. A CPU takes about ten
seconds a prompt.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from diptych.attention import LocalAttend, Role, exponents, int8
from diptych.attention.cores import has_gluon
from diptych.bench.compare import compare
from diptych.bench.forward import relative
from diptych.bench.score import Score, judge
from diptych.bench.score_engine import SIZE
from diptych.bench.toyworld_captions import score_prompts
from diptych.engine.components import Components
from diptych.engine.options import Options, pick_device
from diptych.engine.order import take_batch
from diptych.engine.progress import Progress
from diptych.engine.runner import Runner
from diptych.engine.sharing import Sharing
from diptych.engine.stages import Stages
from diptych.media.clip import Clip
from diptych.memory.precision import EXACT, FP8, Precision
from diptych.model import plain
from diptych.model.checkpoint import Checkpoint
from diptych.parallel import Layout
from diptych.request import ClipRequest
from diptych.sampling.denoiser import combine_serial

FEW_KEYS = (Role.VISUAL_TEXT, Role.VIDEO_FROM_AUDIO)
"""Where results may be written in e4m3 with one scale (`diptych.attention.queries`)."""
EVERY = 3
"""Steps between two that are watched."""


def scores_of(q_BSHK: Tensor, k_BSHK: Tensor) -> Tensor:
    return torch.einsum("bqhk,bshk->bhqs", q_BSHK, k_BSHK) / math.sqrt(q_BSHK.shape[-1])


def attend(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor) -> Tensor:
    """Attention in float32."""
    return torch.einsum("bhqs,bshk->bqhk", scores_of(q_BSHK, k_BSHK).softmax(-1), v_BSHK)


def whole(x: int8.Rounded) -> Tensor:
    scale_BHS = x.scale.repeat_interleave(int8.TOKENS, 2)[:, :, : x.values.shape[1]]
    return x.values.float() * scale_BHS.transpose(1, 2).unsqueeze(-1)


def played(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor) -> Tensor:
    """Attention in int8: queries and keys rounded, all multiplied in float32."""
    q_BSHK, k_BSHK = (whole(int8.rounded_plainly(x)) for x in (q_BSHK, k_BSHK))
    return attend(q_BSHK, k_BSHK, v_BSHK.float())


def by_kernel(q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor) -> Tensor:
    """The same by its kernel, heads filled up with zeros after they were rounded."""
    from diptych.attention.bounded_kernel import attention_int8

    K = q_BSHK.shape[-1]
    q, k = int8.rounded(q_BSHK), int8.rounded(k_BSHK)
    q_values, k_values, v_BSHK = (pad(x, (0, 128 - K)) for x in (q.values, k.values, v_BSHK))
    q, k = int8.Rounded(q_values, q.scale * exponents.factor(K)), int8.Rounded(k_values, k.scale)
    return attention_int8(q, k, v_BSHK, False)[0][..., :K].float()


class Watching(LocalAttend):
    """Video self-attention in int8 or exact; keeps the errors of int8 on what it is given, where it is told to look."""

    def __init__(self, approximate: bool) -> None:
        super().__init__()
        self.approximate, self.looking = approximate, False
        self.errors: dict[str, list[float]] = {}
        self.sharpness: list[float] = []

    def exact(self) -> LocalAttend:
        return LocalAttend()

    def __call__(
        self,
        role: Role,
        q_BSHK: Tensor,
        k_BSHK: Tensor,
        v_BSHK: Tensor,
        key_mask_BS: Tensor | None = None,
        *,
        bound: float | None = None,
    ) -> Tensor:
        if role is not Role.VISUAL_SELF:
            out = super().__call__(role, q_BSHK, k_BSHK, v_BSHK, key_mask_BS, bound=bound)
            if self.looking and role in FEW_KEYS:
                self.look_at_few(out.float().flatten(2), v_BSHK)
            return out
        assert bound is None, "the demo model's heads of 32 have no kernel that asks for one"
        if self.looking:
            self.look(q_BSHK.float(), k_BSHK.float(), v_BSHK.float())
        if not self.approximate:
            return super().__call__(role, q_BSHK, k_BSHK, v_BSHK, key_mask_BS)
        return played(q_BSHK, k_BSHK, v_BSHK).to(q_BSHK.dtype)

    def look_at_few(self, out_BSD: Tensor, v_BSHK: Tensor) -> None:
        """Keeps what rounding these results to e4m3 is off by."""
        scale = plain.common_scale(v_BSHK)
        one = (out_BSD / scale).to(torch.float8_e4m3fn).float() * scale
        rows = plain.to_rows(out_BSD)
        for name, rounded in (("few keys, one scale", one), ("a scale a row", rows.values.float() * rows.scale)):
            self.errors.setdefault(name, []).append(relative(rounded, out_BSD))

    def look(self, q_BSHK: Tensor, k_BSHK: Tensor, v_BSHK: Tensor) -> None:
        """Keeps the errors of this call, and over how many keys a query spreads its weight (1 / sum of squares)."""
        exact = attend(q_BSHK, k_BSHK, v_BSHK)
        ways: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"played": played}
        if q_BSHK.is_cuda and has_gluon(q_BSHK.device):
            ways["kernel"] = lambda q, k, v: by_kernel(*(x.bfloat16() for x in (q, k, v)))
        for name, way in ways.items():
            self.errors.setdefault(name, []).append(relative(way(q_BSHK, k_BSHK, v_BSHK), exact))
        weights = scores_of(q_BSHK, k_BSHK).softmax(-1)
        self.sharpness.append(float((1 / weights.square().sum(-1)).median()))


def clips_of(runner: Runner, requests: list[ClipRequest], watch: Watching | None) -> list[Clip]:
    """A batch of clips. watch: looks at every `EVERY`th step."""
    checkpoint = runner.components.options.checkpoint
    orders = take_batch(requests, checkpoint.defaults)

    def on_step(progress: Progress) -> None:
        if watch is not None:
            watch.looking = progress.stage == "denoise" and progress.done % EVERY == 0

    return runner.generate(orders, Stages(on_step))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--checkpoint", default="demo")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--device")
    given = parser.parse_args()
    device = pick_device(given.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    checkpoint = Checkpoint.open(given.checkpoint)
    chosen = score_prompts(given.prompts)
    requests = [ClipRequest(prompt, seed=0, steps=given.steps, **SIZE) for _, prompt in chosen]
    results: dict[str, Any] = {"device": str(device), "torch": torch.__version__, "prompts": given.prompts, "clips": []}
    exact: list[Clip] = []
    settings = [
        ("exact", EXACT, False),
        ("fp8 products", FP8, False),
        ("fp8 attention", EXACT, True),
        ("fp8 both", FP8, True),
        ("fp8 both, first step's attention exact", Precision("fp8", steps=1), True),
    ]
    for name, precision, approximate in settings:
        start = time.perf_counter()
        options = Options(checkpoint, Layout(), device, dtype, timedelta(seconds=600), precision=precision)
        watch = Watching(approximate)
        sharing = Sharing(lambda tokens, watch=watch: (watch, None), combine_serial)
        runner = Runner(Components.load(options, device, first=True), sharing)
        score, figures, made = Score(), [], []
        for n in range(0, len(requests), given.batch):
            made += clips_of(runner, requests[n : n + given.batch], watch if name == "exact" else None)
        for (scene, prompt), clip in zip(chosen, made, strict=True):
            score.verdicts.append(judge(scene, clip, prompt, 0))
        if name == "exact":
            exact = made
            results["attention"] = {
                way: {"median": float(np.median(e)), "mean": float(np.mean(e)), "worst": float(np.max(e)), "of": len(e)}
                for way, e in watch.errors.items()
            }
            results["keys a query looks at, median"] = float(np.median(watch.sharpness))
            print(json.dumps({"attention": results["attention"], "keys": results["keys a query looks at, median"]}))
        else:
            figures = [compare(one, other).figures for one, other in zip(exact, made, strict=True)]
        row: dict[str, Any] = {
            "setting": name,
            "right": score.to_dict()["measures"],
            "seconds": time.perf_counter() - start,
        }
        if figures:
            row |= {
                "psnr": float(np.mean([f["psnr"] for f in figures])),
                "worst_psnr": float(min(f["worst_psnr"] or 0 for f in figures)),
                "log_mel": float(np.mean([f["log_mel"] for f in figures])),
            }
        results["clips"].append(row)
        told = {key: value for key, value in row.items() if key not in ("setting", "right")}
        print(name, {k: v["share"] for k, v in row["right"].items()}, {k: round(v, 2) for k, v in told.items()})
        given.out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
