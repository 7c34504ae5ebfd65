"""`python -m tools.toyworld COMMAND`: preview the data, train a stage, export the checkpoint."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from safetensors import SafetensorError

from diptych.errors import UserError


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.toyworld", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    train = commands.add_parser("train", help="train one stage for a number of seconds")
    train.add_argument("stage", choices=("video", "audio", "vocoder", "flow", "twin"))
    train.add_argument("--out", type=Path, required=True, help="folder for weights and log")
    train.add_argument("--seconds", type=float, required=True)
    train.add_argument("--batch", type=int, required=True)
    train.add_argument("--state", type=Path, help="weights of an earlier call to go on from")
    train.add_argument("--rate", type=float, help="peak learning rate")
    train.add_argument("--audio", type=Path, help="audio VAE weights (vocoder, flow)")
    train.add_argument("--video", type=Path, help="video VAE weights (flow)")
    train.add_argument("--vocoder", type=Path, help="vocoder weights: judge clips at the end (flow)")
    train.add_argument("--text", type=Path, help="folder of the text encoders (flow)")
    train.add_argument("--clips", type=int, default=32768, help="clips in the pool (flow, twin)")
    train.add_argument("--encode-seconds", type=float, default=30.0, help="time to encode the pool in (flow, twin)")
    train.add_argument("--finish-after", type=float, help="latest end, in seconds from the start (flow, twin)")
    train.add_argument("--wait-for", type=Path, help="file that says the VAEs are ready (flow)")
    train.add_argument("--teacher", default="demo", help="checkpoint that the twin imitates (twin)")
    train.add_argument("--plain", action="store_true", help="launch every kernel anew, record no step (flow, twin)")
    train.add_argument("--unfused", action="store_true", help="torch's own kernels only (flow, twin)")

    text = commands.add_parser("text", help="write the text encoders and tokenizers")
    text.add_argument("folder", type=Path)

    profile = commands.add_parser("profile", help="where a training step spends its time")
    profile.add_argument("stage", choices=("video", "flow"))
    profile.add_argument("--batch", type=int, required=True)

    export = commands.add_parser("export", help="write the checkpoint")
    export.add_argument("folder", type=Path)
    source = export.add_mutually_exclusive_group(required=True)
    source.add_argument("--weights", type=Path, help="folder with the stages' weights")
    source.add_argument("--twin", type=Path, help="twin.safetensors: write the distilled checkpoint")
    export.add_argument("--teacher", default="demo", help="checkpoint that the twin shares all else with")

    judge = commands.add_parser("judge", help="score checkpoints side by side on held-out prompts, in large batches")
    judge.add_argument("file", type=Path, help="JSON that keeps the scores; what it holds is not made again")
    judge.add_argument("runs", nargs="+", help="FOLDER, FOLDER@STEPS or FOLDER@STEPS@GUIDANCE")
    judge.add_argument("--prompts", type=int, default=64)
    judge.add_argument("--seeds", type=int, default=3, help="how many, from 0")

    reference = commands.add_parser("reference", help="clips that start from a picture, measured")
    reference.add_argument("--model", default="demo")
    reference.add_argument("--count", type=int, default=16)
    reference.add_argument("--json", type=Path, help="write all figures")

    gallery = commands.add_parser("gallery", help="make clips of held-out prompts and draw them")
    gallery.add_argument("folder", type=Path)
    gallery.add_argument("--model", default="demo")
    gallery.add_argument("--count", type=int, default=12)
    gallery.add_argument("--seed", type=int, default=0)

    curves = commands.add_parser("curves", help="draw what training logged")
    curves.add_argument("picture", type=Path)
    curves.add_argument("logs", type=Path, nargs="+")

    preview = commands.add_parser("preview", help="draw a picture of some clips of the training set")
    preview.add_argument("picture", type=Path, nargs="?", default=Path("toyworld.png"))
    preview.add_argument("--seed", type=int, default=1)
    preview.add_argument("--count", type=int, default=12)

    options = parser.parse_args()
    if options.command == "train":
        _train(options)
    elif options.command == "text":
        from tools.toyworld.text import write

        write(options.folder)
    elif options.command == "profile":
        from tools.toyworld.profiling import profile as run

        run(options.stage, options.batch)
    elif options.command == "export":
        _export(options)
    elif options.command == "judge":
        from tools.toyworld.scores import scores

        print(scores(options.file, options.runs, options.prompts, options.seeds))
    elif options.command == "reference":
        from tools.toyworld.reference import reference as held

        print(held(options.model, options.count, options.json))
    elif options.command == "gallery":
        from tools.toyworld.gallery import gallery as look

        print(*look(options.folder, options.model, options.count, options.seed))
    elif options.command == "curves":
        from tools.toyworld.gallery import curves as plot

        print(plot(options.picture, options.logs))
    else:
        from tools.toyworld.preview import preview as show

        print(show(options.picture, options.count, options.seed))


def _export(options: argparse.Namespace) -> None:
    from diptych.model.checkpoint import Checkpoint
    from tools.toyworld.export import export, export_twin

    if options.twin is None:
        print(export(options.folder, options.weights))
    else:
        print(export_twin(options.folder, options.twin, Checkpoint.open(options.teacher).root))


def _train(options: argparse.Namespace) -> None:
    rate = {} if options.rate is None else {"rate": options.rate}
    common = (options.out, options.seconds, options.batch)
    if options.stage == "video":
        from tools.toyworld.video_vae import train as video

        video(*common, options.state, **rate)
    elif options.stage == "audio":
        from tools.toyworld.audio_parts import train_vae

        train_vae(*common, options.state, **rate)
    elif options.stage == "vocoder":
        from tools.toyworld.audio_parts import train_vocoder

        train_vocoder(*common, options.audio, options.state, **rate)
    elif options.stage == "twin":
        from tools.toyworld.twin import train as twin

        twin(
            *common,
            teacher=options.teacher,
            clips=options.clips,
            encode_seconds=options.encode_seconds,
            state=options.state,
            finish_after=options.finish_after,
            plain=options.plain,
            fused=not options.unfused,
            **rate,
        )
    else:
        from tools.toyworld.flow import train as flow

        flow(
            *common,
            text=options.text,
            video=options.video,
            audio=options.audio,
            vocoder=options.vocoder,
            clips=options.clips,
            encode_seconds=options.encode_seconds,
            state=options.state,
            finish_after=options.finish_after,
            wait_for=options.wait_for,
            plain=options.plain,
            fused=not options.unfused,
            **rate,
        )


if __name__ == "__main__":
    try:
        main()
    except (UserError, OSError, SafetensorError) as error:
        sys.exit(f"toyworld: {error}")
