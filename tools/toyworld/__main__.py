"""`python -m tools.toyworld COMMAND`: preview the data, train a stage, export the checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.toyworld", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    train = commands.add_parser("train", help="train one stage for a number of seconds")
    train.add_argument("stage", choices=("video", "audio", "vocoder"))
    train.add_argument("--out", type=Path, required=True, help="folder for weights and log")
    train.add_argument("--seconds", type=float, required=True)
    train.add_argument("--batch", type=int, required=True)
    train.add_argument("--state", type=Path, help="weights of an earlier call to go on from")
    train.add_argument("--audio", type=Path, help="audio VAE weights (vocoder)")

    options = parser.parse_args()
    if options.command == "train":
        if options.stage == "video":
            from tools.toyworld.video_vae import train as run

            run(options.out, options.seconds, options.batch, options.state)
        else:
            from tools.toyworld.audio_parts import train_vae, train_vocoder

            if options.stage == "audio":
                train_vae(options.out, options.seconds, options.batch, options.state)
            else:
                train_vocoder(options.out, options.seconds, options.batch, options.audio, options.state)


if __name__ == "__main__":
    main()
