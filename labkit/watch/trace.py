"""What a watch saw, in one small file: the same tables anywhere, with no Java and no cluster."""

from __future__ import annotations

import os
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from labkit.errors import LabError
from labkit.views.live import View
from labkit.watch.decode import EVENTS
from labkit.watch.fold import Tables

FORMAT = b"1"
CHUNK = 64  # batches that are joined, since a small one takes as much memory as a large one
MOST_EVENTS = 500_000  # of history, where the window would hold more
TO_DO = 'give the path of a file written by watch.save("….trace")'


class History:
    """The events of a window, and the tables as they were before its first."""

    def __init__(self, window: int) -> None:
        self._base = Tables(window)
        self._window = window
        self._chunks: list[pa.RecordBatch] = []
        self._new: list[pa.RecordBatch] = []

    def add(self, events: pa.RecordBatch) -> None:
        """Keep some more events."""
        self._new.append(events)
        if len(self._new) >= CHUNK:
            self._chunks.append(pa.concat_batches(self._new))
            self._new = []

    def trim(self, most: int = MOST_EVENTS) -> None:
        """Fold what is older than the window into its beginning."""
        rows = sum(chunk.num_rows for chunk in self._chunks)
        newest = max((_newest(chunk) for chunk in self._chunks[-1:]), default=0)
        while self._chunks and (rows > most or _newest(self._chunks[0]) < newest - self._window):
            chunk = self._chunks.pop(0)
            rows -= chunk.num_rows
            self._base.take([chunk])
        self._base.forget()

    def save(self, path: Path) -> Path:
        """Write a trace; a file that is there is replaced only by a whole one."""
        table = pa.Table.from_batches([*self._chunks, *self._new], schema=EVENTS)
        told = {b"labkit trace": FORMAT, b"before": self._base.to_json().encode()}
        part = path.parent / f".{path.name}.{os.getpid()}"
        try:
            table = table.replace_schema_metadata(told)
            pq.write_table(table, part, compression="zstd", write_page_checksum=True)
            part.replace(path)
        except OSError as error:
            raise LabError(
                f"cannot write {path}: {os.strerror(error.errno) if error.errno else error}",
                "name a file in a folder that exists and that you may write to",
            ) from None
        finally:
            with suppress(OSError):
                part.unlink()
        return path


def _newest(events: pa.RecordBatch) -> int:
    return int(pc.max(events.column("at")).as_py() or 0)


class Trace:
    """A watch from a file: the same tables, as they were when it was saved."""

    def __init__(self, path: Path, tables: Tables, events: pa.Table) -> None:
        self._path, self._tables, self._events = path, tables, events

    def offsets(self, group: str | None = None) -> pd.DataFrame:
        """Return group, topic, partition, start, committed, position, end, lag, at."""
        return self._tables.offsets(group)

    def ownership(self, group: str | None = None) -> pd.DataFrame:
        """Return group, topic, partition, member, since, until, state."""
        return self._tables.ownership(group)

    def members(self, group: str | None = None) -> pd.DataFrame:
        """Return group, member, id, client, host, protocol, epoch (or generation), state."""
        return self._tables.members(group)

    def playback(self, group: str | None = None) -> View:
        """Show the run again, with a slider: go back, step, play."""
        return View(lambda: nullcontext(self._tables), group, past=True)

    def __repr__(self) -> str:
        groups = ", ".join(sorted(self._tables.groups)) or "no groups"
        return f"trace {self._path.name}: {self._events.num_rows} events of {groups}"


def open(path: str | Path) -> Trace:
    """Open a trace that ``watch.save`` wrote."""
    path = Path(path)
    try:
        data = path.read_bytes()  # not by its path: of a folder, Arrow would read all files
        return _read(path, data)
    except FileNotFoundError:
        raise LabError(f"there is no file {path}", TO_DO) from None
    except (pa.ArrowException, ValueError, KeyError) as error:
        why = str(error).partition("\n")[0]
        raise LabError(f"{path} is no trace, or a damaged one: {why}", TO_DO) from None
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error).partition("\n")[0]
        raise LabError(f"cannot read {path}: {why}", TO_DO) from None


def _read(path: Path, data: bytes) -> Trace:
    table = pq.read_table(pa.BufferReader(data), page_checksum_verification=True)
    told: dict[Any, Any] = table.schema.metadata or {}
    version = told.get(b"labkit trace", b"").decode()
    if not version:
        raise LabError(f"{path} is no trace of labkit", TO_DO)
    if version != FORMAT.decode():
        raise LabError(
            f"{path} is of version {version}, this labkit reads {FORMAT.decode()}", TO_DO
        )
    tables = Tables.from_json(told[b"before"].decode())
    tables.take(table.select(EVENTS.names).to_batches())
    return Trace(path, tables, table)
