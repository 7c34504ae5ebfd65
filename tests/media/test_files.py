"""Files that are there whole or not at all."""

from __future__ import annotations

import errno
import os

import pytest

from diptych.errors import MediaError
from diptych.media.files import check_writable, free_names, replacing, save_new


def test_a_file_appears_only_when_it_is_complete(tmp_path):
    target = tmp_path / "out.bin"
    target.write_bytes(b"old")
    reader = target.open("rb")
    with replacing(target) as path:
        assert path.parent == tmp_path, "beside the target: a rename must not cross file systems"
        path.write_bytes(b"new")
        assert target.read_bytes() == b"old"
    assert target.read_bytes() == b"new"
    with reader:
        assert reader.read() == b"old", "whoever reads the old file reads it to its end"
    assert list(tmp_path.iterdir()) == [target]


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path, monkeypatch):
    target, synced = tmp_path / "out.bin", []

    def fsync(descriptor, sync=os.fsync):
        sync(descriptor)
        synced.append((os.fstat(descriptor).st_ino, target.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    with replacing(target) as path:
        path.write_bytes(b"new")
    assert synced == [(target.stat().st_ino, False), (tmp_path.stat().st_ino, True)]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ValueError, SystemExit])
def test_whatever_stops_the_writer_leaves_the_old_file(tmp_path, stop):
    target = tmp_path / "out.bin"
    target.write_bytes(b"old")

    def writer():
        with replacing(target) as path:
            path.write_bytes(b"half")
            raise stop

    with pytest.raises(stop):
        writer()
    assert target.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [target]


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, "no room is left"),
        (errno.EDQUOT, "no room is left"),
        (errno.EROFS, "is not allowed"),
        (errno.EIO, "input/output error"),
    ],
)
def test_a_fault_of_the_disk_is_one_sentence(tmp_path, number, words):
    with pytest.raises(MediaError, match=words), replacing(tmp_path / "out.bin"):
        raise OSError(number, "Input/output error")
    assert not list(tmp_path.iterdir())


def test_a_name_too_long_is_one_sentence(tmp_path):
    with pytest.raises(MediaError, match="too long"), replacing(tmp_path / ("x" * 300)):
        pass
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_written_is_refused_before_the_work(tmp_path):
    check_writable(tmp_path / "clip.mp4")
    with pytest.raises(MediaError, match="no folder"):
        check_writable(tmp_path / "a" / "b" / "clip.mp4")
    check_writable(tmp_path / "a" / "b" / "clip.mp4", make_folder=True)
    with pytest.raises(MediaError, match="is a folder"):
        check_writable(tmp_path / "a")
    (tmp_path / "file").touch()
    with pytest.raises(MediaError, match=r"not a directory|file exists"):
        check_writable(tmp_path / "file" / "clip.mp4", make_folder=True)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["file"]


def test_a_new_file_takes_no_name_that_another_run_took_meanwhile(tmp_path):
    first = tmp_path / "clip.mp4"
    first.write_bytes(b"older")

    def save(path):
        path.write_bytes(b"mine")
        (tmp_path / "clip-2.mp4").write_bytes(b"of another run")

    assert save_new(first, save) == tmp_path / "clip-3.mp4"
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        "clip.mp4": b"older",
        "clip-2.mp4": b"of another run",
        "clip-3.mp4": b"mine",
    }


def test_of_runs_that_find_the_same_name_free_each_gets_its_own(tmp_path, monkeypatch):
    first, taken = tmp_path / "clip.mp4", tmp_path / "clip.mp4"
    monkeypatch.setattr("diptych.media.files.free_names", lambda path: iter([path, tmp_path / "clip-2.mp4"]))
    taken.write_bytes(b"of another run")
    assert save_new(first, lambda path: path.write_bytes(b"mine")).read_bytes() == b"mine"
    assert taken.read_bytes() == b"of another run"


def test_a_new_file_that_cannot_be_written_leaves_nothing_and_is_told_by_its_name(tmp_path):
    def save(path):
        path.write_bytes(b"half")
        raise MediaError(f"cannot write {path}: no room is left for it.")

    with pytest.raises(MediaError, match=r"cannot write \S*/clip.mp4: no room"):
        save_new(tmp_path / "clip.mp4", save)
    assert list(tmp_path.iterdir()) == []
    assert next(free_names(tmp_path / "clip.mp4")) == tmp_path / "clip.mp4"
