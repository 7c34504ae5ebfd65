"""`diptych compare`: how far one clip, or a folder of clips, strays from another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from diptych.bench.compare import Comparison
    from diptych.media.clip import Clip


def _limit(help: str) -> Any:
    return typer.Option(help=help, show_default=False)


def compare(
    a: Annotated[Path, typer.Argument(help="A clip or a folder of clips: counts as the truth.", metavar="A")],
    b: Annotated[Path, typer.Argument(help="What is held against it.", metavar="B")],
    sheet: Annotated[
        Path | None, _limit("Draw both, their difference and their sounds; for folders, a folder.")
    ] = None,
    min_psnr: Annotated[float | None, _limit("Least PSNR of the worst frame, dB.")] = None,
    min_ssim: Annotated[float | None, _limit("Least SSIM of the worst frame.")] = None,
    max_temporal: Annotated[float | None, _limit("Most difference of the changes between frames, of 255.")] = None,
    max_log_mel: Annotated[float | None, _limit("Most difference of the log-mel spectra, dB.")] = None,
    min_si_sdr: Annotated[float | None, _limit("Least SI-SDR, dB.")] = None,
    max_lpips: Annotated[float | None, _limit("Most LPIPS of the worst frame.")] = None,
    max_duration: Annotated[float | None, _limit("Most difference of the durations, seconds.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all figures as JSON.")] = False,
) -> None:
    """Hold B against A: PSNR, SSIM, flicker, sound. Exit status 1 when a limit is not kept."""
    from diptych.bench.compare import compare_files, table
    from diptych.bench.compare_sheet import comparison_sheet
    from diptych.media.files import check_writable
    from diptych.media.sheets import save_png

    asked = {
        "worst_psnr": min_psnr,
        "worst_ssim": min_ssim,
        "temporal": max_temporal,
        "log_mel": max_log_mel,
        "si_sdr": min_si_sdr,
        "worst_lpips": max_lpips,
        "duration": max_duration,
    }
    limits = {name: limit for name, limit in asked.items() if limit is not None}
    many = a.is_dir()
    if sheet is not None:
        check_writable(sheet / "sheet.png" if many else sheet, make_folder=many)

    def draw(name: Path, one: Clip, other: Clip, result: Comparison) -> None:
        if sheet is not None:
            target = sheet / f"{name.stem}.png" if many else sheet
            names = (str(a / name.name), str(b / name.name)) if many else (str(a), str(b))
            save_png(target, comparison_sheet(one, other, result, names))

    results = compare_files(a, b, draw)
    broken = [f"{name}: {sentence}" for name, result in results.items() for sentence in result.beyond(limits)]
    if as_json:
        clips = {name: result.to_dict() for name, result in results.items()}
        print(json.dumps({"clips": clips, "limits": limits, "broken": broken}))
    else:
        print(table(results))
        for sentence in broken:
            print(sentence)
    raise typer.Exit(1 if broken else 0)
