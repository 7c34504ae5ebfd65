"""Group commit: who waits shares a transaction, and suffers for nobody else's fault."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.engine import Connection
from sqlalchemy.exc import IntegrityError, OperationalError

from diptych.server.store.database import Database
from diptych.server.store.tables import keys
from diptych.server.store.together import Refusal, Together

Work = Callable[[Connection], Any]


class Group:
    """Runs work in threads of its own, all of it in one transaction: it waits behind one that is held."""

    def __init__(self, folder: Path) -> None:
        self.db = Database(f"sqlite:///{folder / 'jobs.db'}")
        self.db.migrate()
        self.together = Together(self.db)
        self.commits = 0
        sa.event.listen(self.db.engine, "commit", self._count)

    def _count(self, _connection: Connection) -> None:
        self.commits += 1

    def run(self, *works: Work) -> list[Any]:
        """What each returned or raised; the commits they took are in `commits`."""
        held, go = threading.Event(), threading.Event()

        def hold(_: Connection) -> None:
            held.set()
            go.wait(10)

        ends: list[Any] = [None] * len(works)

        def one(index: int, work: Work) -> None:
            try:
                ends[index] = self.together.run(work)
            except Exception as error:
                ends[index] = error

        first = threading.Thread(target=self.together.run, args=(hold,))
        first.start()
        assert held.wait(10)
        threads = []
        for index, work in enumerate(works):
            threads.append(threading.Thread(target=one, args=(index, work)))
            threads[-1].start()
            while len(self.together._waiting) <= index:  # so that their order is known
                assert threads[-1].is_alive()
        self.commits = 0
        go.set()
        for thread in [first, *threads]:
            thread.join(10)
            assert not thread.is_alive()
        self.commits -= 1  # of the one that was held
        return ends

    def kept(self) -> list[str]:
        with self.db.read() as c:
            return list(c.scalars(sa.select(keys.c.key).order_by(keys.c.created_ms)))


def insert(key: str, at: int = 0) -> Work:
    def work(c: Connection) -> str:
        c.execute(sa.insert(keys), {"scope": "s", "key": key, "job": "j", "body": "b", "created_ms": at})
        return key

    return work


def refuse(_: Connection) -> None:
    raise Refusal("no")


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Group]:
    found = Group(tmp_path)
    yield found
    found.db.close()


def test_what_waits_shares_one_commit_in_the_order_it_came(group: Group) -> None:
    names = [f"k{i}" for i in range(12)]
    assert group.run(*(insert(name, at) for at, name in enumerate(names))) == names
    assert group.commits == 1
    assert group.kept() == names


def test_work_sees_what_the_work_before_it_wrote(group: Group) -> None:
    def count(c: Connection) -> int:
        return int(c.scalar(sa.select(sa.func.count()).select_from(keys)) or 0)

    assert group.run(count, insert("a"), count, insert("b"), count) == [0, "a", 1, "b", 2]


def test_a_refusal_is_its_own(group: Group) -> None:
    first, second, third = group.run(insert("a", 1), refuse, insert("b", 2))
    assert (first, third) == ("a", "b")
    assert isinstance(second, Refusal)
    assert (group.kept(), group.commits) == (["a", "b"], 1)


def test_work_that_breaks_a_rule_of_the_tables_spoils_nobody_elses(group: Group) -> None:
    first, second, third = group.run(insert("a", 1), insert("a", 2), insert("b", 3))
    assert (first, third) == ("a", "b")
    assert isinstance(second, IntegrityError)
    assert group.kept() == ["a", "b"]


def test_when_the_disk_is_full_all_of_the_group_are_told_and_the_next_one_is_tried(group: Group) -> None:
    def full(_: Connection) -> None:
        raise OperationalError("COMMIT", {}, Exception("database or disk is full"))

    ends = group.run(insert("a"), full, insert("b"))
    assert [type(end) for end in ends] == [OperationalError] * 3
    assert group.kept() == []
    assert group.run(insert("c")) == ["c"]
    assert group.kept() == ["c"]
