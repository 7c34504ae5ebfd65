"""The store alone: fair turns, fencing, clocks that jump, and a schema that the migrations make."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from diptych.server.running.messages import Step
from diptych.server.running.progress import Tracker
from diptych.server.settings import SettingsError, load
from diptych.server.store.database import Database
from diptych.server.store.files import Files
from diptych.server.store.job import Job, error, is_id, new_id, runner_id, surely_dead
from diptych.server.store.jobs import JobStore, QueueFull
from diptych.server.store.tables import metadata


class Clock:
    def __init__(self) -> None:
        self.ms = 1_800_000_000_000

    def __call__(self) -> int:
        return self.ms


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(tmp_path: Path, clock: Clock) -> Iterator[JobStore]:
    database = Database(f"sqlite:///{tmp_path / 'jobs.db'}")
    database.migrate()
    yield JobStore(database, ttl_ms=10_000, clock=clock)
    database.close()


def submit(store: JobStore, key: str = "", priority: int = 0, limit: int = 100) -> str:
    job_id, _ = store.submit(
        new_id(store.clock()), spec={"a": 1}, key=key, priority=priority, max_queue=limit, max_queue_per_key=None
    )
    return job_id


def claim(store: JobStore) -> Job:
    job = store.claim("runner")
    assert job is not None
    return job


def test_the_migrations_make_exactly_the_tables_of_the_code(store: JobStore) -> None:
    found = sa.inspect(store.db.engine)
    for table in metadata.sorted_tables:
        columns = {c["name"]: (str(c["type"]), c["nullable"]) for c in found.get_columns(table.name)}
        dialect = store.db.engine.dialect
        assert columns == {c.name: (c.type.compile(dialect), bool(c.nullable)) for c in table.columns}
        indexes = {i["name"] for i in found.get_indexes(table.name)}
        assert {i.name for i in table.indexes} <= indexes


def test_ids_sort_by_creation_and_say_nothing_else() -> None:
    assert new_id(1_000) < new_id(1_001)
    assert is_id(new_id(5))
    assert not any(is_id(t) for t in ("video_", "video_../../../etc/passwd00000000000", "sync", "video_" + "A" * 32))


def test_one_key_is_served_first_come_first_served(store: JobStore) -> None:
    made = [submit(store) for _ in range(5)]
    assert [claim(store).id for _ in range(5)] == made


def test_keys_take_turns_and_a_higher_priority_goes_first(store: JobStore) -> None:
    many = [submit(store, "many") for _ in range(3)]
    few = submit(store, "few")
    urgent = submit(store, "vip", priority=1)
    assert [claim(store).id for _ in range(5)] == [urgent, many[0], few, many[1], many[2]]


def test_the_queue_is_served_in_order_although_the_clock_jumps_back(store: JobStore, clock: Clock) -> None:
    first = submit(store)
    clock.ms -= 3_600_000
    second = submit(store)
    assert second < first, "the id follows the clock"
    assert [claim(store).id, claim(store).id] == [first, second]


def test_a_clock_that_jumps_ahead_makes_no_running_job_expire_or_stall(store: JobStore, clock: Clock) -> None:
    submit(store)
    job = claim(store)
    clock.ms += 10**9
    assert store.expire() == []
    assert store.tell(job, progress=5) == ""
    assert store.complete(job, {}, 1)
    clock.ms -= 2 * 10**9
    assert store.recent_seconds() == [pytest.approx(10**6)]
    assert store.get(job.id) is not None


def test_progress_and_patience_follow_the_monotonic_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.time", lambda: pytest.fail("the wall clock decides nothing"))
    tracker = Tracker(outputs=2, stall_timeout=120)
    seen = []
    for output in range(2):
        for stage, done, total in (
            ("text", 1, 1),
            *(("denoise", i, 4) for i in range(5)),
            ("decode", 1, 1),
            ("text", 1, 1),  # told late: no reason to fall back
            ("mux", 0, 1),
        ):
            now[0] += 20
            tracker.take(Step("j", output, stage, done, total, 0.0, None))
            seen.append(tracker.progress)
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (1, 99)
    assert tracker.steps == [20.0] * 8
    assert tracker.limit == 200


def test_a_runner_that_lost_its_job_changes_nothing_any_more(store: JobStore) -> None:
    submit(store)
    lost = claim(store)
    assert store.requeue(lost)
    again = claim(store)
    assert again.attempt == 2
    assert store.tell(lost, progress=50) is None
    assert not store.complete(lost, {}, 1)
    assert not store.stop(lost, error("stalled", "x"))
    assert not store.requeue(lost)
    found = store.get(again.id)
    assert found is not None
    assert (found.status, found.progress) == ("in_progress", 1)


def test_a_finished_job_never_changes_and_a_deleted_one_never_returns(store: JobStore) -> None:
    submit(store)
    job = claim(store)
    assert store.complete(job, {}, 1)
    done = store.get(job.id)
    assert not store.stop(job, error("stalled", "x"))
    assert store.ask_stop(job.id, "cancel") == "completed"
    assert store.get(job.id) == done
    assert store.ask_stop(job.id, "delete") == "completed"
    assert not store.complete(job, {}, 1)
    assert store.get(job.id) is None
    assert store.ask_stop(job.id, "delete") is None


def test_delete_wins_over_completion_and_over_cancel(store: JobStore) -> None:
    submit(store)
    job = claim(store)
    assert store.ask_stop(job.id, "delete") == "in_progress"
    assert store.ask_stop(job.id, "cancel") == "in_progress"
    assert store.tell(job) == "delete"
    assert not store.complete(job, {}, 1)
    assert store.stop(job, error("interrupted", "x")) is True
    assert store.get(job.id) is None


def test_a_cancelled_job_is_cancelled_whatever_else_ended_it(store: JobStore) -> None:
    submit(store)
    job = claim(store)
    store.ask_stop(job.id, "cancel")
    assert store.stop(job, error("engine_failed", "x")) is False
    found = store.get(job.id)
    assert found is not None
    assert found.error is not None
    assert found.error["code"] == "cancelled"


def test_the_queue_limit_counts_what_waits(store: JobStore) -> None:
    for _ in range(3):
        submit(store, limit=3)
    with pytest.raises(QueueFull):
        submit(store, limit=3)
    claim(store)
    submit(store, limit=3)


def test_what_waited_too_long_fails(store: JobStore, clock: Clock) -> None:
    old = submit(store)
    clock.ms += 5_000
    young = submit(store)
    assert store.fail_waiting(clock.ms - 1_000) == 1
    got = [store.get(i) for i in (old, young)]
    assert [j.status for j in got if j] == ["failed", "queued"]


def test_runners_of_this_host_are_known_dead_or_alive() -> None:
    mine = runner_id(0)
    host, pid, start, index = mine.rsplit(":", 3)
    assert not surely_dead(mine)
    assert surely_dead(f"{host}:{pid}:{int(start) + 1}:{index}"), "a later process of the same number"
    assert surely_dead(f"{host}:4194999:1:0")
    assert not surely_dead(f"other-host:{pid}:1:0"), "another host may always live"


def test_a_publication_needs_a_job_that_is_still_there(tmp_path: Path) -> None:
    files = Files(tmp_path)
    job = new_id(5)
    files.create(job, b"image")
    (files.new_work(job, 1) / "0.mp4").write_bytes(b"clip")
    files.remove(job)
    with pytest.raises(FileNotFoundError):
        files.publish(job, 1)
    assert not (tmp_path / "jobs" / job).exists()


def test_a_half_written_file_is_never_seen_under_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = Files(tmp_path)
    job = new_id(5)

    def fail(*_: Any) -> None:
        raise OSError(28, "no space")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no space"):
        files.create(job, b"image")
    assert files.input(job) is None


# -- settings -----------------------------------------------------------------------------------------


def test_flags_win_over_variables_and_variables_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "diptych.yaml"
    file.write_text("port: 1\nttl: 2\nmax_queue: 3\nlayout: [cfg=2, ulysses=2]\nreplicas: 2\n")
    monkeypatch.setenv("DIPTYCH_PORT", "11")
    monkeypatch.setenv("DIPTYCH_TTL", "12")
    found = load(["ckpt", "--config", str(file), "--port", "21"])
    assert (found.port, found.ttl, found.max_queue, found.layout) == (21, 12, 3, ["cfg=2", "ulysses=2"])
    assert (found.replica_layout(0), found.replica_layout(1)) == ("cfg=2", "ulysses=2")


def test_the_printed_settings_can_be_read_back_and_hide_keys(tmp_path: Path) -> None:
    given = load(["ckpt", "--api-key", "very-secret-key", "--warm-up", "64x64x5", "--gpus", "0,1", "--replicas", "2"])
    text = given.as_yaml()
    assert "very-secret" not in text
    file = tmp_path / "again.yaml"
    file.write_text("\n".join(line for line in text.splitlines() if "*" not in line and "api_key:" not in line))
    again = load([], config=file)
    assert again.warm_up == ["64x64x5"]
    assert [again.replica_gpus(i) for i in range(2)] == ["0", "1"]


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (["--port", "99999"], "--port = '99999'"),
        (["--warm-up", "3x3"], "not WIDTHxHEIGHTxFRAMES"),
        (["--layout", "cfg=2", "--layout", "ring=2"], "one for each of the 1 replicas"),
        (["--gpus", "0,1,2", "--replicas", "2"], "cannot be divided evenly"),
        (["--api-key", "short"], "at least 8 characters"),
        (["--replicas", "0"], "needs a database"),
        (["--root-path", "studio"], "starts with /"),
        (["--config", "/nowhere.yaml"], "is no file"),
        (["--on-restart", "explode"], "--on-restart = 'explode'"),
        (["--memory", "0"], "--memory = '0': a size such as 6GiB"),
        (["--layout", "ulysses=0"], "layout ulysses = 0 is not accepted"),
        (
            ["--layout", "ulysses=2,shard=2", "--offload", "model"],
            "offload = 'model' is not accepted: layout ulysses=2",
        ),
    ],
)
def test_a_bad_setting_is_one_sentence(flags: list[str], sentence: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load(["ckpt", *flags])
    assert sentence in str(refused.value)
    assert "\n" not in str(refused.value)


def test_an_unknown_key_in_the_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "diptych.yaml"
    file.write_text("prot: 1\n")
    with pytest.raises(SettingsError, match="prot"):
        load([], config=file)
