"""What this machine has, what of it Diptych can use, and what to do about what it lacks."""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from packaging.requirements import Requirement

from diptych.memory.footprint import GIB
from diptych.model.catalogue import CATALOGUE
from diptych.planner.cards import card_shown
from diptych.planner.machine import Gpu, gpus_here, host_memory

State = Literal["ok", "note", "bad"]
SERVER_PORT = 8000
WITH_CUDA = "install torch with CUDA: pip install torch"
SPACE = {"lite": 28e9, "lite-distill": 27e9, "pro": 90e9, "pro-distill": 81e9}
"""Bytes of the weight files on the hub."""


@dataclass(frozen=True)
class Check:
    """One thing looked at. `bad` keeps `diptych generate` from running; `note` costs speed or a feature.

    found: what is there; todo: what to do about it, for everything but `ok`.
    """

    name: str
    state: State
    found: str
    todo: str | None = None


def examine() -> list[Check]:
    """Look at everything. Changes nothing, reaches no network, and never tells what a token is."""
    gpus = gpus_here()
    checks = [python(), *packages()]
    looks: list[Callable[[], Iterator[Check]]] = [
        lambda: devices(gpus),
        lambda: links(gpus),
        lambda: kernels(gpus),
        memory,
        disk,
        hub,
        ports,
        extras,
    ]
    for look in looks:
        checks += look()
    return checks


def can_generate(checks: list[Check]) -> bool:
    return all(check.state != "bad" for check in checks)


def as_json(checks: list[Check]) -> dict[str, Any]:
    return {"can_generate": can_generate(checks), "checks": [asdict(check) for check in checks]}


def python() -> Check:
    found = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        return Check("python", "bad", found, "use Python 3.11, 3.12 or 3.13")
    if platform.system() != "Linux":
        return Check("python", "note", found, "tested on Linux alone; elsewhere it may work on the CPU")
    return Check("python", "ok", found)


def packages() -> Iterator[Check]:
    """What pyproject.toml requires, held against what is installed."""
    for text in metadata.requires("diptych") or []:
        need = Requirement(text)
        if need.marker is not None:  # of an extra
            continue
        try:
            found = metadata.version(need.name)
        except metadata.PackageNotFoundError:
            yield Check(need.name, "bad", "not installed", f"pip install '{need}'")
            continue
        if not need.specifier.contains(found, prereleases=True):
            yield Check(need.name, "bad", found, f"pip install '{need}'")
        elif need.name in ("torch", "av"):  # what needs more than its files
            yield _imported(need.name, found)


def _imported(name: str, version: str) -> Check:
    try:
        importlib.import_module(name)
    except Exception as error:  # a missing library of the system, mostly
        why = str(error).strip().splitlines() or [type(error).__name__]
        return Check(name, "bad", f"{version}, which cannot be imported: {why[0]}", f"reinstall it: pip install {name}")
    return Check(name, "ok", version)


def devices(gpus: list[Gpu]) -> Iterator[Check]:
    """GPUs as the driver and as torch see them."""
    try:
        import torch
    except Exception:  # told by `packages`
        return
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not gpus and not seen:
        yield Check("gpus", "note", "none", "on a CPU only small checkpoints such as demo or tiny are practical")
        return
    told = (
        ", ".join(f"{gpu.name} ({gpu.memory / GIB:.0f} GiB)" for gpu in gpus) or f"{seen} that nvidia-smi does not show"
    )
    if not seen:
        built = f"torch {torch.__version__} is built for CUDA {torch.version.cuda}"
        todo = "install a driver that is new enough" if torch.version.cuda else WITH_CUDA
        yield Check("gpus", "note", f"{told}, but torch sees none: {built}", todo)
        return
    yield Check("gpus", "ok", f"{told}; driver {gpus[0].driver if gpus else 'unknown'}, CUDA {torch.version.cuda}")
    for name in sorted({gpu.name for gpu in gpus if gpu.capability < (8, 0)}):
        yield Check(
            "dtype",
            "note",
            f"{name} multiplies no bfloat16",
            "nothing: float16 is taken; fused kernels need Ampere or newer",
        )
    for name in sorted({gpu.name for gpu in gpus if card_shown(gpu.name) is None}):
        yield Check(
            "card", "note", f"{name} is not in the table", "for `diptych plan` name the nearest card with --gpus"
        )


def links(gpus: list[Gpu]) -> Iterator[Check]:
    """How several GPUs reach each other."""
    if len(gpus) < 2:
        return
    found = topology()
    if found is None:
        yield Check(
            "links", "note", "nvidia-smi tells nothing", "measure them: python benchmarks/multi_gpu.py OUT.json"
        )
    elif found:
        yield Check("links", "ok", f"NVLink ({', '.join(sorted(found))})")
    else:
        yield Check("links", "note", "PCIe alone", "prefer cfg=2 and several groups of few cards: see `diptych plan`")
    shared = Path("/dev/shm")
    if shared.is_dir() and shutil.disk_usage(shared).total < GIB:
        size = shutil.disk_usage(shared).total / (1 << 20)
        yield Check("shared memory", "note", f"/dev/shm has {size:.0f} MiB", "give the container more: --shm-size=4g")
    try:
        import torch.distributed as dist

        if not dist.is_nccl_available():
            yield Check("nccl", "bad", "torch has no NCCL", WITH_CUDA)
    except Exception:  # told by `packages`
        return


def topology() -> set[str] | None:
    """The kinds of NVLink that nvidia-smi draws between GPUs, such as NV18; None where it draws nothing."""
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return read_topology(done.stdout)


def read_topology(text: str) -> set[str] | None:
    rows = [line.split() for line in text.splitlines() if line.startswith("GPU") and len(line.split()) > 1]
    cells = [cell for row in rows for cell in row[1 : 1 + len(rows)]]
    return {cell for cell in cells if cell.startswith("NV") and cell[2:].isdecimal()} if cells else None


def kernels(gpus: list[Gpu]) -> Iterator[Check]:
    """Attention and element-wise kernels that these GPUs could use."""
    if not gpus:
        return
    if any(gpu.capability >= (8, 0) for gpu in gpus):
        yield _kernel("triton", "fused kernels and the fast decoder", "pip install triton")
    if any(gpu.capability[0] == 9 for gpu in gpus):
        yield _gluon()
        yield _kernel(
            "fa3_fwd_interface",
            "FlashAttention-3 for sound",
            "pip install 'diptych[hopper]'; cuDNN is taken until then",
        )
    try:
        import torch

        version = torch.backends.cudnn.version()
    except Exception:  # told by `packages`
        return
    if version is None:
        yield Check("cudnn", "note", "torch finds none", WITH_CUDA)
    else:
        yield Check("cudnn", "ok", str(version))


def _gluon() -> Check:
    try:
        from diptych.attention.cores import gluon_refusal

        refusal = gluon_refusal()
    except Exception:  # torch cannot be imported: told by `packages`
        return Check("gluon", "note", "not known without torch")
    if refusal is None:
        return Check("gluon", "ok", "attention without a maximum")
    todo = "pip install the triton that torch asks for; FlashAttention-3 or cuDNN is taken until then"
    return Check("gluon", "note", f"{refusal}: no attention without a maximum, no int8", todo)


def _kernel(module: str, gives: str, todo: str) -> Check:
    try:
        importlib.import_module(module)
    except Exception as error:
        return Check(module, "note", f"cannot be imported ({type(error).__name__}): no {gives}", todo)
    return Check(module, "ok", gives)


def memory() -> Iterator[Check]:
    """Host memory, of which weights need most while they are offloaded."""
    whole = host_memory()
    if whole is None:
        return
    found = f"{whole / GIB:.0f} GiB"
    if whole < 8 * GIB:
        yield Check("host memory", "note", found, "released checkpoints need more; the demo model runs")
    elif whole < 90 * GIB:
        yield Check("host memory", "note", found, "enough for Lite; Pro with --offload takes 67 to 81 GiB on one GPU")
    else:
        yield Check("host memory", "ok", found)


def cache_folder() -> Path:
    """Where the hub's files are kept."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def disk() -> Iterator[Check]:
    """Room for checkpoints, and for clips here."""
    folder = cache_folder()
    there = next((path for path in (folder, *folder.parents) if path.is_dir()), Path("/"))
    free = shutil.disk_usage(there).free
    missing = {name: size for name, size in SPACE.items() if name not in downloaded(folder)}
    found = f"{free / 1e9:.0f} GB free for checkpoints in {folder}"
    if not os.access(there, os.W_OK):
        yield Check(
            "disk", "note", f"{folder} cannot be written", "set HF_HOME to a folder that can, or use local folders"
        )
    elif missing and free < min(missing.values()):
        yield Check("disk", "note", found, "Lite takes 28 GB, Pro 90: free some, or set HF_HOME to a larger disk")
    else:
        yield Check("disk", "ok", found)
    if not os.access(Path.cwd(), os.W_OK):
        yield Check("here", "note", f"{Path.cwd()} cannot be written", "name a folder that can with --output")


def downloaded(folder: Path) -> set[str]:
    """The catalogue's names of which the hub cache has a weight file."""
    found = set()
    for name, repo in CATALOGUE.items():
        home = folder / f"models--{repo.replace('/', '--')}" / "snapshots"
        if next(home.glob("*/transformer/*.safetensors"), None) is not None:
            found.add(name)
    return found


def hub() -> Iterator[Check]:
    """Whether checkpoints can be fetched. Whether there is a token is told, never the token."""
    from huggingface_hub import constants, get_token

    there = sorted(downloaded(cache_folder()))
    yield Check("checkpoints", "ok", "in the cache: " + (", ".join(there) or "none"))
    if constants.HF_HUB_OFFLINE:
        state: State = "ok" if there else "note"
        yield Check("hub", state, "HF_HUB_OFFLINE is set", None if there else "unset it to download a checkpoint")
        return
    if get_token() is None:
        yield Check("hub token", "note", "none", "Pro needs one: accept its terms on the hub, then `hf auth login`")
    else:
        yield Check("hub token", "ok", "there")


def ports() -> Iterator[Check]:
    """Ranks meet on a port of this host; the server listens on 8000 unless told otherwise."""
    try:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
    except OSError as error:
        yield Check(
            "ports", "note", f"none can be opened: {error.strerror}", "without one a clip runs on one rank only"
        )
        return
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            one.bind(("127.0.0.1", SERVER_PORT))
        except OSError:
            yield Check("ports", "note", f"{SERVER_PORT} is taken", "start the server with --port, or stop what has it")
            return
    yield Check("ports", "ok", f"{SERVER_PORT} is free")


def extras() -> Iterator[Check]:
    """What `diptych serve` and previews need."""
    lacking = [name for name in ("fastapi", "uvicorn", "sqlalchemy") if importlib.util.find_spec(name) is None]
    if lacking:
        yield Check("server", "note", f"no {', '.join(lacking)}", "for `diptych serve`: pip install 'diptych[server]'")
    else:
        yield Check("server", "ok", "installed")
