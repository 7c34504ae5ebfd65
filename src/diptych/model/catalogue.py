"""The published checkpoints by name, and fetching one from the hub with huggingface_hub."""

from __future__ import annotations

import difflib
import io
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diptych.errors import CheckpointError
from diptych.model.headers import StoredTensor, stored_tensors

CATALOGUE = {
    name.lower(): f"kandinskylab/Kandinsky-6.0-{name}-5s-Diffusers"
    for name in ("Pro", "Pro-distill", "Pro-pretrain", "Lite", "Lite-distill", "Lite-pretrain")
}

BUILT_IN = Path(__file__).parent.parent / "demo"
"""Where the package keeps the checkpoint called `demo`."""

OnBytes = Callable[[int, int], None]
"""Told (bytes done, bytes known of) while something downloads or loads; the second may grow during a download."""

_SMALL = ["*.json", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class Snapshot:
    """A repository at one commit: `root` holds its small files, and its weights if they were asked for.

    `files` are the paths of all files of that commit, relative to the root.
    """

    repo: str
    commit: str
    root: Path
    files: tuple[str, ...]


def hub_id(name: str) -> str:
    """The hub id of a catalogue name or of a name that is one already.

    Raises `CheckpointError` for anything else, naming the nearest catalogue name.
    """
    if name.lower() in CATALOGUE:
        return CATALOGUE[name.lower()]
    if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith("."):
        return name
    known = ("demo", *CATALOGUE)
    near = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {near[0]}?" if near else "known names are " + ", ".join(known)
    raise CheckpointError(f"{name} is no folder here and no name of a checkpoint; {hint}")


def fetch(repo: str, revision: str | None, *, weights: bool, on_bytes: OnBytes | None = None) -> Snapshot:
    """Bring a repository into the hub cache; only its small files if not `weights`.

    Takes the token from HF_TOKEN or the login, respects HF_HUB_OFFLINE and HF_HOME, resumes what was interrupted.
    Raises `CheckpointError` when the repository or revision does not exist, is gated, or cannot be reached.
    """
    from huggingface_hub import snapshot_download

    patterns = [*_SMALL, *(["*.safetensors"] if weights else [])]
    with _one_sentence(repo, revision):
        root = Path(
            snapshot_download(repo, revision=revision, allow_patterns=patterns, tqdm_class=_silent_bar(on_bytes))
        )
        if weights:
            files = [path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()]
        else:
            files = _listing(repo, root)
    return Snapshot(repo, root.name, root, tuple(sorted(files)))


def remote_header(snapshot: Snapshot, name: str) -> dict[str, StoredTensor]:
    """The tensors of a weight file that is not here, by small requests. Raises as `fetch` does."""
    from huggingface_hub import HfApi

    with _one_sentence(snapshot.repo, snapshot.commit):
        found = HfApi().parse_safetensors_file_metadata(snapshot.repo, name, revision=snapshot.commit)
    header: dict[str, Any] = {
        key: {"dtype": info.dtype, "shape": info.shape, "data_offsets": info.data_offsets}
        for key, info in found.tensors.items()
    }
    return stored_tensors(header, snapshot.root / name, 0)


def _listing(repo: str, root: Path) -> list[str]:
    """All files of the commit that `root` is the snapshot of."""
    from huggingface_hub import HfApi

    return list(HfApi().list_repo_files(repo, revision=root.name))


@contextmanager
def _one_sentence(repo: str, revision: str | None) -> Iterator[None]:
    from huggingface_hub import constants, errors
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined, unused-ignore]  # httpx's base class

    at = f" at revision {revision}" if revision else ""
    try:
        yield
    except errors.GatedRepoError:
        raise CheckpointError(
            f"{repo} is gated: accept its terms at https://huggingface.co/{repo} and set HF_TOKEN to a token "
            "of the account that did"
        ) from None
    except errors.RevisionNotFoundError:
        raise CheckpointError(f"{repo} has no revision {revision}") from None
    except errors.RepositoryNotFoundError:
        raise CheckpointError(f"{repo} is not on the hub, or is private and HF_TOKEN does not open it") from None
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled) as error:
        status = getattr(getattr(error.__cause__, "response", None), "status_code", None)
        if constants.HF_HUB_OFFLINE:
            why = "and HF_HUB_OFFLINE forbids to download it"
        else:
            why = f"and the hub answers with status {status}" if status else "and the hub cannot be reached"
        raise CheckpointError(f"{repo}{at} is not complete in the local cache, {why}") from error
    except errors.HFValidationError:
        raise CheckpointError(f"{repo} is not a name a hub repository can have") from None
    except (HTTPError, OSError) as error:  # the hub's refusals, a broken connection, a full disk
        first = (getattr(error, "strerror", None) or str(error) or type(error).__name__).splitlines()[0]
        raise CheckpointError(f"{repo}{at} could not be downloaded: {first}") from error


def _silent_bar(on_bytes: OnBytes | None) -> type[Any]:
    """A bar class that draws nothing and passes the bytes on; huggingface_hub reports through such classes only."""
    from tqdm.auto import tqdm  # type: ignore[import-untyped, unused-ignore]

    class Bar(tqdm):  # type: ignore[misc, unused-ignore]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **kwargs | {"file": io.StringIO(), "disable": False, "mininterval": 0})

        def display(self, *args: Any, **kwargs: Any) -> None:
            pass

        def update(self, n: float | None = 1) -> bool | None:
            shown: bool | None = super().update(n)
            if on_bytes is not None and self.unit == "B" and self.total and n:
                on_bytes(int(self.n), int(self.total))
            return shown

    return Bar
