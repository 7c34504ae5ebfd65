"""`diptych score`: how often the clips of a toy-world model are right, for any setting of the engine."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.cli.display import Display
from diptych.cli.signals import stoppable
from diptych.cli.usage import within

if TYPE_CHECKING:
    from diptych.bench.score import Verdict


def _option(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, show_default=False)


def score(
    model: Annotated[str | None, _option("A model of the toy world. Default: the one that is built in.")] = None,
    prompts: Annotated[int, typer.Option(help="How many held-out prompts.")] = 64,
    seeds: Annotated[int, typer.Option(help="Clips of each prompt.")] = 1,
    quick: Annotated[bool, typer.Option("--quick", help="12 prompts, one seed: a first impression.")] = False,
    steps: Annotated[int | None, _option("Denoising steps. Default: from the checkpoint.")] = None,
    guidance: Annotated[float | None, _option("1 is off. Default: from the checkpoint.")] = None,
    cache: Annotated[str | None, _option("Step cache, as in generate.")] = None,
    precision: Annotated[str, _option("exact, fp8 or fp8:steps=1,first=2,last=2. Default: exact.")] = "exact",
    dtype: Annotated[str | None, _option("float32, bfloat16 or float16. Default: by the device.")] = None,
    device: Annotated[str | None, _option("cpu, cuda, cuda:1 … Default: the first GPU, else the CPU.")] = None,
    layout: Annotated[str | None, _option("How ranks share the clips, such as cfg=2,ulysses=4.")] = None,
    batch: Annotated[int, typer.Option(help="Clips that are denoised together.")] = 4,
    check: Annotated[bool, typer.Option("--check", help="Exit status 1 when a goal is missed.")] = False,
    least: Annotated[float | None, _option("Exit status 1 when the mean is below this, in percent.")] = None,
    output: Annotated[Path | None, _option("Write all figures and verdicts as JSON.", "--json")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
) -> None:
    """Make clips of prompts that were never trained on, measure their pixels and samples, and print the table."""
    from diptych.bench.score_engine import QUICK, SIZE, score_engine
    from diptych.bench.toyworld_captions import score_prompts
    from diptych.engine.engine import Engine, open_checkpoint
    from diptych.engine.options import pick_cache
    from diptych.engine.order import take
    from diptych.media.files import check_writable, replacing
    from diptych.request import ClipRequest

    for option, value, most in (("--prompts", prompts, 1000), ("--seeds", seeds, 1000), ("--batch", batch, 64)):
        within(option, value, 1, most)
    if least is not None:
        within("--least", least, 0, 100)
    if output is not None:
        check_writable(output)
    chosen, wanted = score_prompts(QUICK if quick else prompts), range(1 if quick else seeds)
    fields: dict[str, Any] = {
        name: value for name, value in (("steps", steps), ("guidance", guidance)) if value is not None
    }
    with stoppable(), Display(quiet=quiet) as display:
        checkpoint = open_checkpoint(model, display)
        take(ClipRequest(chosen[0][1], **SIZE, **fields), checkpoint.defaults, pick_cache(cache, checkpoint))
        started = time.perf_counter()

        def on_clip(done: int, total: int, verdict: Verdict) -> None:
            display.restart()
            wrong = [name for name, share in verdict.shares.items() if share is not None and share < 1]
            display.say(f"{done} of {total}: {verdict.prompt}" + (f"  [{', '.join(wrong)}]" if wrong else ""))

        with Engine.load(
            checkpoint,
            layout=layout,
            device=device,
            dtype=dtype,
            precision=precision,
            cache=cache,
            on_progress=display,
        ) as engine:
            result = score_engine(engine, chosen, wanted, batch=batch, on_step=display, on_clip=on_clip, **fields)
    if result is None:  # a rank of torchrun that is not the first
        return
    seconds = time.perf_counter() - started
    print(result.table())
    print(f"{len(result.verdicts)} clips, {seconds:.0f} s")
    if output is not None:
        setting = fields | {"cache": cache, "precision": precision, "layout": layout, "dtype": dtype}
        told = {"model": checkpoint.name, "setting": setting, "seconds": seconds, **result.to_dict()}
        with replacing(output) as temporary:
            temporary.write_text(json.dumps(told, indent=1) + "\n")
    low = least is not None and 100 * result.total < least
    if low:
        print(f"the mean, {100 * result.total:.1f} %, is below {least:g} %")
    if check and result.missed:
        print("below their goals: " + ", ".join(result.missed))
    raise typer.Exit(1 if low or (check and result.missed) else 0)
