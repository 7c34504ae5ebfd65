"""The program of a rank process: imports what every rank needs, then lives as `rank_main` says."""

from __future__ import annotations

import gc
import sys
from multiprocessing.connection import Connection


def main() -> None:
    gc.disable()  # what is imported stays: looking through it for cycles took a sixth of the start
    from diffusers import AutoencoderKLHunyuanVideo  # noqa: F401 - most of the start, and every rank decodes

    from diptych.engine.ranks import rank_main

    gc.freeze()
    gc.enable()
    rank_main(*(Connection(int(fd)) for fd in sys.argv[1:3]))


if __name__ == "__main__":
    main()
