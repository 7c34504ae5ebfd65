"""`diptych client`: submit to a running server, watch, download; needs nothing but the standard library and rich."""

from __future__ import annotations

import base64
import mimetypes
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from diptych.cli.api import LOCAL, Api, RefusedError
from diptych.errors import RequestError, UserError
from diptych.media.files import check_writable, replacing

app = typer.Typer(no_args_is_help=True)

Url = Annotated[str, typer.Option("--url", help="Address of the server.", envvar="DIPTYCH_URL")]
Id = Annotated[str, typer.Argument(help="Id of a video.")]


@app.command()
def submit(
    prompt: Annotated[str, typer.Argument(help="What the clip shows and sounds like.")],
    image: Annotated[Path | None, typer.Option(help="First frame.")] = None,
    size: Annotated[str | None, typer.Option(help="WIDTHxHEIGHT.")] = None,
    seconds: Annotated[float | None, typer.Option(help="Length.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps.")] = None,
    seed: Annotated[int | None, typer.Option(help="Same seed, same clip.")] = None,
    field: Annotated[list[str] | None, typer.Option(help="Any other field, as name=value; repeatable.")] = None,
    output: Annotated[Path | None, typer.Option(help="Watch, then write the MP4 here.")] = None,
    url: Url = LOCAL,
) -> None:
    """Queue a clip and print its id; with --output also wait for it and download it."""
    body: dict[str, Any] = {"prompt": prompt, "size": size, "seconds": seconds, "num_inference_steps": steps}
    body["seed"] = seed
    for text in field or []:
        name, sep, value = text.partition("=")
        if not sep:
            raise RequestError("--field", text, "name=value")
        body[name] = value
    if image is not None:
        body["input_reference"] = _data_url(image)
    if output is not None:
        check_writable(output)
    api = Api(url)
    job = api.json("POST", "/v1/videos", "id", {k: v for k, v in body.items() if v is not None})
    print(job["id"])
    if output is not None:
        _watch(api, job["id"])
        _download(api, job["id"], "video", output)


@app.command()
def watch(video_id: Id, url: Url = LOCAL) -> None:
    """Follow a clip until it ends."""
    _watch(Api(url), video_id)


@app.command()
def download(
    video_id: Id,
    output: Annotated[Path, typer.Option(help="File to write.")] = Path("clip.mp4"),
    variant: Annotated[str, typer.Option(help="video, thumbnail, spritesheet, waveform or an output.")] = "video",
    url: Url = LOCAL,
) -> None:
    """Write a finished clip, or a picture of it, to a file."""
    check_writable(output)
    _download(Api(url), video_id, variant, output)


@app.command("list")
def list_videos(limit: Annotated[int, typer.Option(help="How many.")] = 20, url: Url = LOCAL) -> None:
    """Show the latest clips."""
    for job in Api(url).json("GET", f"/v1/videos?limit={limit}", "data")["data"]:
        state = f"{job['status']} {job['progress']} %" if job["status"] == "in_progress" else job["status"]
        shape = f"{job['size']} {job['duration_s']:.1f} s, {job['num_inference_steps']} steps, seed {job['seed']}"
        print(f"{job['id']}  {state:<16} {shape:<44} {' '.join(job['prompt'].split())[:60]}")


@app.command()
def cancel(video_id: Id, url: Url = LOCAL) -> None:
    """Stop a clip at its next step; its record stays."""
    print(Api(url).json("POST", f"/v1/videos/{video_id}/cancel", "status")["status"])


@app.command()
def delete(video_id: Id, url: Url = LOCAL) -> None:
    """Stop a clip and remove all of it."""
    Api(url).json("DELETE", f"/v1/videos/{video_id}", "deleted")
    print("deleted")


def _watch(api: Api, video_id: str) -> None:
    """Raises `RefusedError` when the clip fails or is deleted."""
    columns = (TextColumn("{task.description:<12}"), BarColumn(bar_width=32), TextColumn("{task.percentage:>3.0f} %"))
    with Progress(
        *columns, TimeElapsedColumn(), TextColumn("{task.fields[note]}"), console=Console(stderr=True)
    ) as bars:
        task = bars.add_task("queued", total=100, note="")
        for name, data in api.events(video_id):
            if name == "failed":
                raise RefusedError(f"{video_id} failed: {data['error']['message']}")
            if name == "deleted":
                raise RefusedError(f"{video_id} was deleted")
            if name in ("snapshot", "progress", "completed"):
                left = data.get("eta_s")
                place = data.get("queue_position")
                note = f"{left:.0f} s left" if left is not None else f"{place} ahead" if place else ""
                label = data.get("stage") or data["status"]
                bars.update(task, completed=data["progress"], description=label, note=note)


def _download(api: Api, video_id: str, variant: str, output: Path) -> None:
    data = api.read(f"/v1/videos/{video_id}/content?variant={variant}")
    with replacing(output) as whole:
        whole.write_bytes(data)
    print(output)


def _data_url(image: Path) -> str:
    kind = mimetypes.guess_type(image.name)[0] or "image/png"
    try:
        return f"data:{kind};base64," + base64.b64encode(image.read_bytes()).decode()
    except OSError as error:
        raise UserError(f"image {image} cannot be read: {(error.strerror or str(error)).lower()}.") from None
