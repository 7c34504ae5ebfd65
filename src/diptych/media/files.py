"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import itertools
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from diptych.errors import MediaError

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """Give a new empty file beside `path`; when the block ends it is synced and takes the place of `path`.

    When the block raises, whatever it raises, the file is removed and what stood at `path` is untouched. A link at
    `path` stays, and what it points to is replaced.
    Raises `MediaError` for a folder that is missing or not writable, a target that is no file, and a full disk.
    """
    target = _target(path)
    temporary = target.parent / f".diptych-{secrets.token_hex(6)}.part"
    try:
        _check_target(path, target)
        temporary.touch(exist_ok=False)
        yield temporary
        _sync(temporary)
        temporary.replace(target)
    except OSError as error:
        raise MediaError(f"cannot write {path}: {_why(error, target.parent)}.") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
    with suppress(OSError):  # some file systems cannot sync a folder
        _sync(target.parent)


def free_names(first: Path) -> Iterator[Path]:
    """`first` and what follows it, clip.mp4, clip-2.mp4 …, where nothing stands at present."""
    following = (first.with_stem(f"{first.stem}-{number}") for number in itertools.count(2))
    return (name for name in itertools.chain([first], following) if not os.path.lexists(name))


def save_new(first: Path, save: Callable[[Path], object]) -> Path:
    """Have `save` write a file, and give it the first of `free_names`; of runs at the same time each gets its own.

    Raises what `save` raises, and leaves nothing behind.
    """
    part = first.parent / f".diptych-{secrets.token_hex(6)}.part"
    try:
        save(part)
        for name in free_names(first):
            try:
                name.touch(exist_ok=False)
            except FileExistsError:
                continue
            part.replace(name)
            return name
    except MediaError as error:
        raise MediaError(str(error).replace(str(part), str(first))) from error
    except OSError as error:
        raise MediaError(f"cannot write {first}: {_why(error, first.parent)}.") from error
    finally:
        with suppress(OSError):
            part.unlink(missing_ok=True)
    raise AssertionError("names without end")


def check_writable(path: str | Path, make_folder: bool = False) -> None:
    """Refuse now what `replacing` would refuse after hours of work; a full disk can only be seen then.

    make_folder: make the folder of `path` where it is missing.
    Raises `MediaError`.
    """
    target = _target(path)
    probe = target.parent / f".diptych-{secrets.token_hex(6)}.part"
    try:
        if make_folder:
            target.parent.mkdir(parents=True, exist_ok=True)
        _check_target(path, target)
        probe.touch(exist_ok=False)
        probe.unlink()
    except OSError as error:
        raise MediaError(f"cannot write {path}: {_why(error, target.parent)}.") from error


def check_apart(*paths: str | Path | None) -> None:
    """Refuse two files of one run that are one file. Raises `MediaError`."""
    seen: dict[Path, str | Path] = {}
    for path in paths:
        if path is not None:
            other = seen.setdefault(_target(path), path)
            if other is not path:
                raise MediaError(f"cannot write {other} and {path}: they are one file; give two names.")


def check_folder(path: Path) -> None:
    """Refuse now a folder that could not be made or written in after hours of work. Raises `MediaError`."""
    there = _target(path)
    while not there.exists() and there != there.parent:
        there = there.parent
    if not there.is_dir():
        raise MediaError(f"cannot write in {path}: {there} is not a folder.")
    if not os.access(there, os.W_OK | os.X_OK):
        raise MediaError(f"cannot write in {path}: writing in {there} is not allowed.")


def _target(path: str | Path) -> Path:
    """What `path` leads to, links followed."""
    try:
        return Path(os.path.realpath(path))
    except (OSError, ValueError, TypeError) as error:  # a current folder that is gone, a NUL, no path at all
        why = error.strerror.lower() if isinstance(error, OSError) and error.strerror else error
        raise MediaError(f"cannot write {path!r}: it is no path of a file ({why}).") from None


def _check_target(path: str | Path, target: Path) -> None:
    if target.is_dir():
        raise MediaError(f"cannot write {path}: it is a folder; give the name of a file.")
    if target.exists() and not target.is_file():
        raise MediaError(f"cannot write {path}: it is not a regular file; give the name of a file.")
    if not target.parent.is_dir():
        raise MediaError(f"cannot write {path}: there is no folder {target.parent}; make it first.")


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _why(error: OSError, folder: Path) -> str:
    if error.errno in _NO_ROOM:
        return f"no room is left for it in {folder}; free some or write elsewhere"
    if error.errno in _FORBIDDEN:
        return f"writing in {folder} is not allowed; choose a folder you may write to"
    return (error.strerror or str(error)).lower()
