"""`diptych serve`: an OpenAI-compatible video server with a studio page."""

from __future__ import annotations

import typer

from diptych.errors import UserError

CONTEXT = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""For `app.command`: flags, and their help, come from the server's settings."""


def serve(context: typer.Context) -> None:
    """Serve a checkpoint over HTTP; `diptych serve --help` lists every setting."""
    try:
        from diptych.server.main import serve as run
        from diptych.server.settings import load
    except ModuleNotFoundError as error:
        raise UserError(f"the server needs {error.name}: pip install 'diptych[server]'") from None
    settings = load(context.args)
    if settings.print_config:
        print(settings.as_yaml(), end="")
        return
    run(settings)
