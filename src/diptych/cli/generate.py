"""`diptych generate`: one clip from a prompt, or many from a file."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from diptych.cli.display import Display, print_json
from diptych.cli.signals import stoppable
from diptych.errors import MediaError, MissingError, RankError, RequestError, UserError
from diptych.request import ClipRequest, changed

if TYPE_CHECKING:
    from diptych.engine.engine import Engine
    from diptych.media.clip import Clip

UNNAMED = Path("clip.mp4")
"""What a clip is called that was given no name; where that is taken, clip-2.mp4 and so on."""
Text = Annotated[str | None, typer.Argument(help="What the clip shows and sounds like.", show_default=False)]


def _option(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, show_default=False)


def generate(
    prompt: Text = None,
    model: Annotated[str | None, _option("Checkpoint: a folder, a hub id, or a name such as lite-distill.")] = None,
    output: Annotated[Path | None, _option("MP4 to write. Default: clip.mp4, or the next free clip-2.mp4 …")] = None,
    image: Annotated[Path | None, _option("Picture to start from.")] = None,
    fit: Annotated[str | None, _option("How the picture is fitted: crop, pad or stretch. Default: crop.")] = None,
    negative: Annotated[str | None, _option("What to steer away from. Default: the authors' text.")] = None,
    width: Annotated[int | None, _option("Pixels, a multiple of 16. Default: from the checkpoint.")] = None,
    height: Annotated[int | None, _option("Pixels, a multiple of 16. Default: from the checkpoint.")] = None,
    frames: Annotated[int | None, _option("Frames, 4k + 1. Default: from the checkpoint.")] = None,
    seconds: Annotated[float | None, _option("Length instead of --frames.")] = None,
    fps: Annotated[float | None, _option("Frames a second. Default: 24.")] = None,
    steps: Annotated[int | None, _option("Denoising steps. Default: from the checkpoint.")] = None,
    guidance: Annotated[
        float | None, _option("How closely to follow the text; 1 is off. Default: from the checkpoint.")
    ] = None,
    seed: Annotated[int | None, _option("Same seed, same clip. Default: a new one, told afterwards.")] = None,
    audio: Annotated[bool | None, _option("With or without sound. Default: with.", "--audio/--no-audio")] = None,
    audio_level: Annotated[
        str | None, _option("clip keeps the level, normalize raises the peak to full scale.")
    ] = None,
    sigma_grid: Annotated[str | None, _option("Noise grid of base models: diffusers or native.")] = None,
    noise_dtype: Annotated[str | None, _option("Dtype that noise is drawn in: float32, bfloat16 or float16.")] = None,
    dtype: Annotated[
        str | None, _option("Working dtype: float32, bfloat16 or float16. Default: by the device.")
    ] = None,
    precision: Annotated[
        str | None,
        _option(
            "exact, or fp8 (faster and smaller, an approximation); fp8:1 attends exactly in the first step, "
            "fp8:steps=1,first=2,last=2 also computes the outer blocks exactly. Default: exact."
        ),
    ] = None,
    text_precision: Annotated[
        str | None, _option("exact, 8bit or nf4: the language model in fewer bits, an approximation. Default: exact.")
    ] = None,
    modulation: Annotated[
        str, _option("resident, or tables: its weights wait in host memory, same clip. Default: resident.")
    ] = "resident",
    cache: Annotated[
        str | None, _option("Predict some forwards, an approximation: taylor, magcache:0.24,2 … Default: none.")
    ] = None,
    pipefusion: Annotated[
        str | None, _option("With --layout pipeline=P: WARMUP,PATCHES, such as 2,8. An approximation.")
    ] = None,
    offload: Annotated[
        str | None, _option("none, model or block: what is on the GPU only while it is used. Default: by --memory.")
    ] = None,
    memory: Annotated[
        str | None, _option("What all of it may take on each GPU, such as 22GiB. Default: no limit.")
    ] = None,
    decode_memory: Annotated[
        str | None, _option("What decoding may take, such as 6GiB; less means tiles. Default: as diffusers decodes.")
    ] = None,
    device: Annotated[str | None, _option("cpu, cuda, cuda:1 … Default: the first GPU, else the CPU.")] = None,
    layout: Annotated[str | None, _option("How ranks share the clip, such as cfg=2,ulysses=4, or auto.")] = None,
    from_clip: Annotated[
        Path | None, _option("Make a clip again as this MP4 says; other options change it.", "--from")
    ] = None,
    prompts: Annotated[Path | None, _option("Many clips: a JSON request a line, or a plain prompt a line.")] = None,
    output_dir: Annotated[Path | None, _option("Folder for --prompts.")] = None,
    latents_out: Annotated[Path | None, _option("Also write the final latents (.safetensors).")] = None,
    trace: Annotated[Path | None, _option("Folder for per-rank timings; `diptych trace` draws them.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report on standard output.")] = False,
) -> None:
    """Make a clip with sound from a text, and a picture if you like."""
    options: dict[str, Any] = {
        "negative": negative,
        "image": image,
        "fit": fit,
        "width": width,
        "height": height,
        "frames": frames,
        "seconds": seconds,
        "fps": fps,
        "steps": steps,
        "guidance": guidance,
        "seed": seed,
        "audio": audio,
        "audio_level": audio_level,
        "sigma_grid": sigma_grid,
        "noise_dtype": noise_dtype,
    }
    given = {name: value for name, value in options.items() if value is not None}
    engine = {
        "dtype": dtype,
        "modulation": modulation,
        "cache": cache,
        "pipefusion": pipefusion,
        "offload": offload,
        "memory": memory,
        "decode_memory": decode_memory,
        "device": device,
        "layout": layout,
        "trace": trace,
    }
    named = {"precision": precision, "text_precision": text_precision}
    engine |= {name: value for name, value in named.items() if value is not None}
    with stoppable(), Display(quiet=quiet) as display:
        if prompts is not None:
            for name, value in (
                ("PROMPT", prompt),
                ("--output", output),
                ("--from", from_clip),
                ("--latents-out", latents_out),
            ):
                if value is not None:
                    raise RequestError(name, str(value), "leave it out with --prompts, which makes many clips")
            if output_dir is None:
                raise MissingError("--output-dir", "--prompts needs a folder to write the clips to")
            failed = _many(prompts, output_dir, given, model, engine, display, as_json)
            raise typer.Exit(1 if failed else 0)
        if output_dir is not None:
            raise RequestError("--output-dir", str(output_dir), "it goes with --prompts; use --output for one clip")
        if from_clip is not None:
            request, model, engine = _again(from_clip, prompt, given, model, engine)
        elif prompt is None:
            raise MissingError("PROMPT", 'say what the clip shows, such as diptych generate "waves at dusk"')
        else:
            request = ClipRequest(prompt, **given)
        _one(request, model, output, latents_out, engine, display, as_json)


def _one(
    request: ClipRequest,
    model: str | None,
    output: Path | None,
    latents_out: Path | None,
    options: dict[str, Any],
    display: Display,
    as_json: bool,
) -> None:
    from diptych.engine.engine import Engine, open_checkpoint
    from diptych.engine.options import pick_cache
    from diptych.engine.order import take
    from diptych.media.files import check_apart, check_writable, free_names

    for path in (output or next(free_names(UNNAMED)), latents_out):
        if path is not None:
            check_writable(path)
    check_apart(output or next(free_names(UNNAMED)), latents_out)
    checkpoint = open_checkpoint(model, display)
    take(
        request, checkpoint.defaults, pick_cache(options["cache"], checkpoint)
    )  # what cannot be honoured is refused before a weight is read
    with Engine.load(checkpoint, **options, on_progress=display) as engine:
        made = _make(engine, request, output, display)
        if made is None:  # a rank of torchrun that is not the first
            return
        clip, output = made
        if latents_out is not None:
            clip.save_latents(latents_out)
    _tell(clip.report, output, display, as_json)


def _many(
    prompts: Path,
    folder: Path,
    given: dict[str, Any],
    model: str | None,
    options: dict[str, Any],
    display: Display,
    as_json: bool,
) -> int:
    from diptych.engine.engine import Engine
    from diptych.media.files import check_writable

    lines = _read_lines(prompts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError("--output-dir", str(folder), f"a folder that can be made ({_reason(error)})") from None
    check_writable(folder / "0001.mp4")
    failed = 0
    with Engine.load(model, **options, on_progress=display) as engine:
        for number, line in lines:
            display.restart()
            path = folder / f"{number:04d}.mp4"
            try:
                made = _make(engine, _line_request(line, given), path, display)
                if made is None:
                    continue
            except (UserError, RankError) as error:  # lost ranks are started anew
                failed += 1
                display.warn(f"line {number}: {error}")
                if as_json:
                    print_json({"line": number, "error": str(error)})
                continue
            _tell(made[0].report, path, display, as_json)
    if failed:
        display.warn(f"{failed} of {len(lines)} lines failed; the others are in {folder}")
    return failed


def _read_lines(path: Path) -> list[tuple[int, str]]:
    """The lines that hold something, with their numbers in the file."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # editors on Windows put a mark in front
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError("--prompts", str(path), f"a readable UTF-8 file ({_reason(error)})") from None
    # Not splitlines: what it also splits at, such as U+2028, may stand inside a JSON text.
    lines = [(number, line.strip()) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise RequestError("--prompts", str(path), "a file with at least one line")
    return lines


def _line_request(line: str, given: dict[str, Any]) -> ClipRequest:
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        if not line.startswith("{"):
            return ClipRequest(line, **given)
        raise RequestError("line", line, f"JSON or a plain prompt ({error.msg} at column {error.colno})") from None
    except (ValueError, RecursionError):  # numbers without end, brackets without end
        raise RequestError("line", line, "JSON of a size that can be read, or a plain prompt") from None
    if not isinstance(values, dict):
        raise RequestError("line", line, "a JSON object of fields, or a plain prompt")
    return ClipRequest.from_dict(changed(given, values))


def _again(
    path: Path, prompt: str | None, given: dict[str, Any], model: str | None, options: dict[str, Any]
) -> tuple[ClipRequest, str | None, dict[str, Any]]:
    """What a file says: its request, its checkpoint, and with which precisions it was computed."""
    from diptych.media.mp4 import read_report, read_request

    changes = given if prompt is None else given | {"prompt": prompt}
    request, report = read_request(path, **changes), read_report(path)
    made_with = report.get("checkpoint")
    kept = {name: report[name] for name in ("precision", "text_precision") if name in report}
    if model is None and not isinstance(made_with, str):
        raise MediaError(f"{path} does not say which checkpoint made it; give --model.")
    return request, model or made_with, kept | options


def _make(engine: Engine, request: ClipRequest, path: Path | None, display: Display) -> tuple[Clip, Path] | None:
    """The clip and where it was written; its picture is encoded while it is decoded."""
    from diptych.engine.stages import Stages
    from diptych.media.files import save_new
    from diptych.media.film import Film

    with Film(request.resolve(engine.defaults).fps) as film:
        clip = engine.generate(request, on_step=display, on_frames=film.add)
        if clip is None:
            return None
        save = partial(film.save, clip=clip)
        with Stages(display).stage("mux"):
            return clip, save_new(UNNAMED, save) if path is None else save(path)


def _tell(report: dict[str, Any], path: Path, display: Display, as_json: bool) -> None:
    for note in (*report.get("notes", ()), *report.get("approximate", ())):
        display.say(note)
    total = sum(report.get("seconds", {}).values())
    display.say(f"{path}  (seed {report['request']['seed']}, {total:.1f} s)")
    if as_json:
        print_json(report | {"file": str(path)})


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
