"""The `diptych` command: registers the commands, and turns what a user can change into one sentence."""

from __future__ import annotations

import errno
import io
import os
import sys
import warnings

import typer

from diptych.cli.bench import app as bench_app
from diptych.cli.calibrate import calibrate
from diptych.cli.checkpoint import app as checkpoint_app
from diptych.cli.client import app as client_app
from diptych.cli.compare import compare
from diptych.cli.demo import demo
from diptych.cli.display import visible
from diptych.cli.doctor import doctor
from diptych.cli.generate import generate
from diptych.cli.plan import plan
from diptych.cli.score import score
from diptych.cli.serve import CONTEXT, serve
from diptych.cli.show import show
from diptych.cli.trace import trace
from diptych.cli.tune import tune
from diptych.cli.usage import UsageError, told
from diptych.errors import Cancelled, RankError, UserError

app = typer.Typer(
    name="diptych",
    help="Clips with synchronised sound from text or an image, with Kandinsky 6.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(generate)
app.command()(show)
app.command()(trace)
app.command()(calibrate)
app.command()(compare)
app.command()(tune)
app.command()(score)
app.command()(plan)
app.command()(doctor)
app.command()(demo)
app.command(context_settings=CONTEXT)(serve)
app.add_typer(client_app, name="client", help="Talk to a running server: submit, watch, download.")
app.add_typer(bench_app, name="bench", help="Measure forwards, decodes and loading, and what the machine can do.")
app.add_typer(checkpoint_app, name="checkpoint", help="Write a tiny checkpoint, or look into any.")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def run() -> None:
    """Entry point. Exit status: 0 done, 1 some of many failed or a rank was lost, 2 something to correct, 130 stopped
    (by Ctrl-C too)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a name or prompt that the terminal cannot show is still told
            stream.reconfigure(errors="backslashreplace")
    warnings.filterwarnings("ignore", module="PIL")  # of a picture that is refused, and in one sentence
    try:
        try:
            status = app(standalone_mode=False)
        except UsageError as error:
            if error.format_message():
                raise told(error) from None
            print(error.ctx.get_help())  # a group of commands, and none was named
            status = 2
        finally:
            if sys.stdout is not None:  # None where the caller closed it
                sys.stdout.flush()  # what cannot be written is told below, not by the interpreter at its end
    except OSError as error:  # of files that are written in full or not at all, `MediaError` tells
        if error.errno not in _FULL or os.environ.get("DIPTYCH_DEBUG"):
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer has no other place to go
        sys.exit(_say(f"cannot write to standard output: {str(error.strerror).lower()}.", 1))
    except UserError as error:
        if os.environ.get("DIPTYCH_DEBUG"):
            raise
        sys.exit(_say(str(error), 2))
    except RankError as error:
        if os.environ.get("DIPTYCH_DEBUG"):
            raise
        sys.exit(_say(str(error), 1))
    except Cancelled as error:
        sys.exit(_say(str(error) or "stopped", 130))
    if status == 130:  # Ctrl-C, which typer turns into a silent exit
        _say("stopped", 130)
    sys.exit(status or 0)


def _say(sentence: str, status: int) -> int:
    print(f"diptych: {visible(sentence)}", file=sys.stderr)
    return status
