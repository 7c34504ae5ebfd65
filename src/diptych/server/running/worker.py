"""The engine process: `python -m diptych.server.running.worker`. Loads, then makes clips until its pipe closes.

It leads a process group of its own, so that the ranks it starts end with it.
"""

from __future__ import annotations

import errno
import importlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from diptych.errors import Cancelled, ClipError, DeviceMemoryError, UserError
from diptych.media.film import Film
from diptych.request import ClipDefaults, ClipRequest
from diptych.server.running.family import descendants, kill
from diptych.server.running.finish import OutputInvalid, finish, write_result
from diptych.server.running.messages import Cancel, Failed, Finished, Loading, Ready, Run, Step, Stopped, Unloadable
from diptych.server.shape import warm_up_shape

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from diptych.engine.progress import OnProgress, Progress
    from diptych.media.clip import Clip
    from diptych.parallel.layout import Layout

log = logging.getLogger(__name__)


class Engine(Protocol):
    """What the server needs of `diptych.engine.engine.Engine`."""

    @property
    def layout(self) -> Layout: ...
    @property
    def defaults(self) -> ClipDefaults: ...
    def generate(
        self,
        request: ClipRequest,
        on_step: OnProgress | None = None,
        *,
        cache: str | None = None,
        on_frames: Callable[[NDArray[np.uint8]], None] | None = None,
    ) -> Clip: ...
    def close(self) -> None: ...


LoadEngine = Callable[..., Engine]
Picture = Callable[[Any], bytes]


class Worker:
    """One engine and its pipe. Jobs run on the main thread; a second thread hears `Cancel` meanwhile."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe = pipe
        self.inbox: list[Run] = []
        self.arrived = threading.Condition()
        self.cancelled: set[str] = set()
        self.picture: Picture | None = None

    def listen(self) -> None:
        while True:
            try:
                message = self.pipe.recv()
            except (EOFError, OSError):
                kill(descendants(os.getpid()))  # the server is gone: so is every rank, and so are we
                os.killpg(0, signal.SIGKILL)
            self.take(message)

    def take(self, message: object) -> None:
        with self.arrived:
            if isinstance(message, Cancel):
                self.cancelled.add(message.job)
            elif isinstance(message, Run):
                self.inbox.append(message)
                self.arrived.notify()

    def next(self) -> Run:
        with self.arrived:
            self.arrived.wait_for(lambda: self.inbox)
            run = self.inbox.pop(0)
            self.cancelled &= {run.job}  # the wish to stop may have come with the job; older wishes are void
            return run

    def say(self, message: object) -> None:
        self.pipe.send(message)

    def load(self, load_engine: LoadEngine, options: dict[str, Any]) -> Engine:
        def on_progress(p: Progress) -> None:
            self.say(Loading(f"{p.stage} {p.done}/{p.total}"))

        self.say(Loading("load"))
        engine = load_engine(
            options["checkpoint"],
            layout=options["layout"],
            device=options["device"],
            dtype=options["dtype"],
            precision=options["precision"],
            text_precision=options["text_precision"],
            modulation=options["modulation"],
            offload=options["offload"],
            memory=options["memory"],
            cache=options["step_cache"],
            on_progress=on_progress,
        )
        self.picture = self._fit_preview(engine, options)
        for shape in options["warm_up"]:
            self.say(Loading(f"warm-up {shape}"))
            width, height, frames = warm_up_shape(shape)
            request = ClipRequest(prompt="warm-up", width=width, height=height, frames=frames, steps=2, seed=0)
            engine.generate(request, on_step=on_progress)
        self.say(Ready(asdict(engine.defaults), about(engine.layout)))
        return engine

    def _fit_preview(self, engine: Engine, options: dict[str, Any]) -> Picture | None:
        if not options["preview_every"]:
            return None
        own: Picture | None = getattr(engine, "preview_picture", None)
        if own is not None:
            return own
        from diptych.model.checkpoint import Checkpoint
        from diptych.server.running.preview import picture_for

        try:
            self.say(Loading("preview"))
            return picture_for(Checkpoint.open(options["checkpoint"]).root / "vae", Path(options["cache"]))
        except Exception:
            log.exception("no previews: the latent-to-RGB fit failed")
            return None

    def make(self, engine: Engine, run: Run) -> object:
        """One job, from request to checked files; the answer says how it ended."""
        try:
            reports = []
            _reset_peak()
            for index, seed in enumerate(run.seeds):
                image = None if run.image is None else run.image.read_bytes()
                request = ClipRequest(**run.request, seed=seed, image=image)
                asked, tell, cache = request.resolve(engine.defaults), self._reporter(run, index), run.cache or "none"
                with Film(asked.fps, crf=run.crf, preset=run.preset) as film:
                    clip = engine.generate(request, on_step=tell, cache=cache, on_frames=film.add)
                    self._check(run)
                    self.say(Step(run.job, index, "mux", 0, 1, 0.0, None))
                    with _storing():
                        reports.append(finish(clip, asked, run, index, film))
            with _storing():
                result = write_result(run.folder, reports, _peak_mb())
            self._check(run)
            return Finished(run.job, result)
        except Cancelled:
            return Stopped(run.job)
        except OutputInvalid as error:
            return Failed(run.job, "output_invalid", str(error), fatal=False)
        except ClipError as error:
            return Failed(run.job, "output_invalid", f"The clip was refused: {error}", fatal=False)
        except UserError as error:
            return Failed(run.job, "invalid_value", str(error), fatal=False)
        except StorageFailed as error:
            log.exception("job %s", run.job)
            return Failed(run.job, "storage_failed", str(error), fatal=False)
        except Exception as error:
            log.exception("job %s", run.job)
            if isinstance(error, MemoryError | DeviceMemoryError) or type(error).__name__ == "OutOfMemoryError":
                text = "The engine ran out of memory; ask for fewer pixels or frames."
                return Failed(run.job, "out_of_memory", text, fatal=False)
            return Failed(run.job, "engine_failed", "The engine failed while making the clip.", fatal=True)

    def _check(self, run: Run) -> None:
        if run.job in self.cancelled:
            raise Cancelled

    def _reporter(self, run: Run, output: int) -> OnProgress:
        def report(p: Progress) -> None:
            self._check(run)
            wanted = run.preview_every and p.stage == "denoise" and p.done % run.preview_every == 0
            picture = None
            if wanted and p.preview is not None and self.picture is not None and p.done < p.total:
                picture = self.picture(p.preview())
            self.say(Step(run.job, output, p.stage, p.done, p.total, p.seconds, p.left, picture))

        return report


class StorageFailed(Exception):  # noqa: N818 - an answer, not an error
    """The files of a clip could not be written."""


@contextmanager
def _storing() -> Iterator[None]:
    """An `OSError` here is about the disk; elsewhere it may be a rank that is gone."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise StorageFailed("The disk is full." if full else "The files of the clip could not be written.") from error


def _reset_peak() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()


def _peak_mb() -> float | None:
    """GPU memory at its highest since `_reset_peak`, of this process: ranks in others count their own."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    return round(float(torch.cuda.max_memory_allocated()) / 1e6, 1)


def about(layout: Layout) -> dict[str, Any]:
    """What `/v1/models` tells beside the defaults."""
    return {"layout": str(layout), "num_gpus": layout.world}


def main() -> None:
    """Arguments: the pipe's file descriptor, and the options as JSON."""
    handle, options = int(sys.argv[1]), json.loads(sys.argv[2])
    logging.basicConfig(
        level=options["log_level"].upper(), format="%(asctime)s %(levelname)s engine %(message)s", stream=sys.stderr
    )
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which then tells us
    worker = Worker(Connection(handle))
    threading.Thread(target=worker.listen, daemon=True).start()
    module, _, name = options["engine"].partition(":")
    try:
        load_engine: Any = importlib.import_module(module)
        for part in name.split("."):
            load_engine = getattr(load_engine, part)
        engine = worker.load(load_engine, options)
    except UserError as error:
        worker.say(Unloadable(str(error)))
        return
    while True:
        answer = worker.make(engine, worker.next())
        worker.say(answer)
        if isinstance(answer, Failed) and answer.fatal:
            os._exit(1)  # the ranks may hang in a collective: no orderly end


if __name__ == "__main__":
    main()
