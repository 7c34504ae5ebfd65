"""A real server process for tests: started, waited for, killed in any way, started again on the same state."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx2 as httpx

HERE = Path(__file__).parent
TLS = ssl.create_default_context()
"""Made once: each client would load all certificates anew."""
FAKE = "tests.server.fake_engine:load"
ROOT = HERE.parent.parent
PATHS = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
"""So that a server runs the code under test, also where another copy of it is the installed one."""
_RUN = (
    "import sys; from diptych.server.main import serve; from diptych.server.settings import load; "
    "serve(load(sys.argv[2:]), sys.argv[1])"
)


class Serving:
    """`url`, `client`; `flags` are those of `diptych serve`. Used in a `with` block it leaves no process."""

    def __init__(self, state: Path, *flags: str, checkpoint: str = "fake", engine: str = FAKE, **env: str) -> None:
        self.state, self.flags, self.checkpoint, self.engine = state, flags, checkpoint, engine
        self.log = state.parent / f"{state.name}.log"
        self.env = os.environ | {"PYTHONPATH": PATHS, "OMP_NUM_THREADS": "1"} | env
        self.process: subprocess.Popen[str] | None = None
        self.url = ""

    def __enter__(self) -> Serving:
        try:
            self.start()
        except BaseException:
            self.kill(signal.SIGKILL)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill(signal.SIGTERM if self.alive else signal.SIGKILL)

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    @property
    def client(self) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, verify=TLS)

    def start(self, *, ready: bool = True) -> None:
        command = [sys.executable, "-c", _RUN, self.engine, self.checkpoint, "--port", "0"]
        command += ["--state-dir", str(self.state), "--drain-timeout", "0", *self.flags]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(command, stderr=log, env=self.env, text=True, cwd=ROOT)
        deadline = time.monotonic() + 60
        while "http://" not in (text := self.log.read_text()):
            assert self.alive, self.log.read_text()
            assert time.monotonic() < deadline, "no address"
            time.sleep(0.02)
        self.url = [line for line in text.splitlines() if line.startswith("diptych: http")][-1].split()[1].rstrip("/")
        if ready:
            self.until_ready()

    def until_ready(self, seconds: float = 90) -> None:
        deadline, pause = time.monotonic() + seconds, 0.03
        while True:
            try:
                answer = httpx.get(self.url + "/readyz", timeout=5, verify=TLS)
                if answer.status_code == 200:
                    return
                reason = answer.text
            except httpx.HTTPError as error:
                reason = str(error)
            assert self.alive, self.log.read_text()[-3000:]
            assert time.monotonic() < deadline, reason
            time.sleep(pause)
            pause = min(1.3 * pause, 0.25)  # an engine with a model takes a while

    def kill(self, how: int = signal.SIGKILL) -> int:
        assert self.process is not None
        self.process.send_signal(how)
        code = self.process.wait(30)
        assert not processes_with(str(self.state)), "a process is left"
        return code

    def restart(self) -> None:
        if self.log.exists():
            self.log.rename(self.log.with_suffix(f".{time.monotonic_ns()}.log"))
        self.start()

    def until(self, video_id: str, *states: str, seconds: float = 60) -> dict[str, Any]:
        """Poll until the job is in one of `states`."""
        deadline = time.monotonic() + seconds
        with self.client as client:
            while True:
                job = client.get(f"/v1/videos/{video_id}").json()
                if job.get("status", "gone") in states:
                    return job
                assert time.monotonic() < deadline, job
                time.sleep(0.04)


def processes_with(text: str, seconds: float = 20) -> list[int]:
    """Processes whose command line holds `text`, once they had time to end."""
    deadline = time.monotonic() + seconds
    while True:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                try:
                    if text.encode() in (entry / "cmdline").read_bytes():
                        found.append(int(entry.name))
                except OSError:
                    continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)
