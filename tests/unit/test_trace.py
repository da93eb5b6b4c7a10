"""Traces: the tables of a watch in one small file, and a plain word on every file that is none."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import labkit.watch
from labkit import LabError
from labkit.watch.decode import batch_of
from labkit.watch.fold import Tables
from labkit.watch.trace import History
from tests.unit.test_fold import random_story, told

HOUR = 3_600_000


def history_of(events: list) -> History:
    history = History(HOUR)
    for begin in range(0, len(events), 7):
        history.add(batch_of(events[begin : begin + 7]))
    return history


def fails(path: Path | str, what: str) -> str:
    """Return the first line of the error that opening a file gives; it names the file."""
    with pytest.raises(LabError) as error:
        labkit.watch.open(path)
    assert str(path) in error.value.what and what in error.value.what
    assert len(str(error.value).splitlines()) == 2 and error.value.to_do.startswith("give the path")
    return error.value.what


@pytest.fixture
def saved(tmp_path):
    return history_of(random_story(random.Random(7), 300).events).save(tmp_path / "run.trace")


# --- save and open --------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 1, 6, 7, 500])
def test_a_saved_trace_gives_the_same_tables(tmp_path, steps):
    events = random_story(random.Random(steps), steps).events
    tables = Tables(HOUR)
    tables.take([batch_of(events)])
    opened = labkit.watch.open(history_of(events).save(tmp_path / "run.trace"))
    assert told(opened._tables) == told(tables)
    for name in ("offsets", "ownership", "members"):
        assert getattr(opened, name)().equals(getattr(tables, name)())
    assert f"{len(events)} events" in repr(opened)


def test_a_trace_of_nothing_has_empty_tables(tmp_path):
    opened = labkit.watch.open(History(HOUR).save(tmp_path / "run.trace"))
    assert opened.offsets().empty and opened.ownership().empty and opened.members().empty
    assert repr(opened) == "trace run.trace: 0 events of no groups"
    with pytest.raises(LabError, match="no group 'ship' has been seen"):
        opened.offsets("ship")


def test_a_trace_may_be_named_by_text_or_path_and_lie_anywhere(tmp_path):
    folder = tmp_path / "day=3"  # Arrow would take this for a column
    folder.mkdir()
    path = history_of(random_story(random.Random(1), 50).events).save(folder / ".hidden")
    first, second = labkit.watch.open(path), labkit.watch.open(str(path))
    assert told(first._tables) == told(second._tables)
    assert "day" not in first._events.column_names


def test_a_trace_of_some_hundred_events_is_small(tmp_path):
    events = random_story(random.Random(3), 800).events
    path = history_of(events).save(tmp_path / "run.trace")
    assert len(events) > 600 and path.stat().st_size < 50_000


def test_saving_again_replaces_the_file(tmp_path):
    path = tmp_path / "run.trace"
    history_of(random_story(random.Random(1), 300).events).save(path)
    history_of(random_story(random.Random(2), 5).events).save(path)
    assert labkit.watch.open(path)._events.num_rows < 20
    assert os.listdir(tmp_path) == ["run.trace"]


# --- files that are no traces ---------------------------------------------------------------------


def test_a_file_that_is_not_there_is_said_so(tmp_path):
    fails(tmp_path / "nothing.trace", "there is no file")
    fails(str(tmp_path / "no" / "folder.trace"), "there is no file")


def test_a_folder_is_no_trace(tmp_path, saved):
    assert "directory" in fails(tmp_path, "cannot read").lower()  # though a trace lies in it
    fails(saved / "x", "cannot read")


@pytest.mark.parametrize("content", [b"", b"{}", b"PAR1", b"PAR1" * 50, os.urandom(5000)])
def test_any_other_file_is_no_trace(tmp_path, content):
    (tmp_path / "other.trace").write_bytes(content)
    fails(tmp_path / "other.trace", "is no trace, or a damaged one")


def test_another_parquet_file_is_no_trace(tmp_path):
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "other.parquet")
    fails(tmp_path / "other.parquet", "is no trace of labkit")


def test_a_trace_cut_short_anywhere_is_a_damaged_one(tmp_path, saved):
    data = saved.read_bytes()
    part = tmp_path / "part.trace"
    for length in [*range(0, len(data), 97), len(data) - 1]:
        part.write_bytes(data[:length])
        fails(part, "is no trace, or a damaged one")


def test_a_trace_with_a_wrong_byte_is_a_damaged_one_or_reads_the_same(tmp_path, saved):
    data, part = saved.read_bytes(), tmp_path / "part.trace"
    rng, expected, damaged = random.Random(1), told(labkit.watch.open(saved)._tables), 0
    for _ in range(60):
        place = rng.randrange(len(data))
        part.write_bytes(data[:place] + bytes([data[place] ^ 0xFF]) + data[place + 1 :])
        try:
            assert told(labkit.watch.open(part)._tables) == expected
        except LabError as error:
            assert str(part) in error.what
            damaged += 1
    assert damaged > 20


def test_a_trace_of_another_version_says_which(tmp_path, saved):
    table = pq.read_table(pa.BufferReader(saved.read_bytes()))
    later = table.replace_schema_metadata({**table.schema.metadata, b"labkit trace": b"2"})
    pq.write_table(later, tmp_path / "later.trace")
    fails(tmp_path / "later.trace", "is of version 2, this labkit reads 1")


# --- places that cannot be written ----------------------------------------------------------------


def cannot_save(path: Path) -> None:
    with pytest.raises(LabError) as error:
        history_of(random_story(random.Random(1), 20).events).save(path)
    assert str(path) in error.value.what and error.value.what.startswith("cannot write")
    assert len(str(error.value).splitlines()) == 2 and "folder" in error.value.to_do


def test_a_place_that_cannot_be_written_is_said_so_and_nothing_is_left(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "folder").mkdir()
    cannot_save(tmp_path / "no such folder" / "run.trace")
    cannot_save(tmp_path / "file" / "run.trace")
    cannot_save(tmp_path / "folder")
    cannot_save(tmp_path / ("x" * 300))
    cannot_save(tmp_path / ("x" * 252))  # the name would do, that of the part file would not
    cannot_save(Path("/proc/run.trace"))
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "mine" and not os.listdir(tmp_path / "folder")


def test_an_interrupted_save_leaves_the_old_trace_and_nothing_else(tmp_path, saved, monkeypatch):
    before = saved.read_bytes()

    def interrupted(table, part, **options):
        Path(part).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(pq, "write_table", interrupted)
    with pytest.raises(KeyboardInterrupt):
        History(HOUR).save(saved)
    assert saved.read_bytes() == before and os.listdir(tmp_path) == ["run.trace"]
