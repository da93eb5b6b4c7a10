"""The live watch: a Spark stream over the offsets topic, joined by samples and members' reports."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import pyarrow as pa

from labkit.errors import LabError
from labkit.progress import Progress
from labkit.views.live import View
from labkit.watch import log, session, trace
from labkit.watch.decode import batch_of, decode
from labkit.watch.fold import WINDOW, Tables
from labkit.watch.samples import Sampler
from labkit.watch.tail import Tail

if TYPE_CHECKING:
    from labkit.cluster.cluster import Cluster

TICK = 0.1  # seconds between two looks at reports, and at the stream's health
SAMPLE_EVERY = 0.5
FORGET_EVERY = 60.0
TRIGGER = "200 milliseconds"
CURRENT_WITHIN = 30.0
RETRY_AFTER = 3.0


class Watch:
    """Know at every moment who owns what, and how far each group has read."""

    def __init__(self, cluster: Cluster, window: float = WINDOW / 1000) -> None:
        self._cluster = cluster
        self._spark = session.session(cluster)
        self._checkpoint = session.scratch("checkpoint")
        self._lock = threading.RLock()
        self._tables = Tables(int(window * 1000))
        self._history = trace.History(self._tables.window)
        self._seen: dict[int, int] = defaultdict(lambda: -1)  # by partition of the offsets topic
        self._sampler = Sampler(cluster)
        self._tail = Tail(cluster)
        self._query: Any = None
        self._problem: LabError | None = None  # why the last look failed
        self._stream_problem: LabError | None = None  # why Spark cannot read, as long as it cannot
        self._retry_at = 0.0
        self._caught_up = False
        self._views: list[View] = []
        self._hurry = 0  # rounds that someone waits for
        self._rounds = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="labkit-watch", daemon=True)
        self._thread.start()

    # --- the tables -------------------------------------------------------------------------------

    def offsets(self, group: str | None = None) -> pd.DataFrame:
        """Return group, topic, partition, start, committed, position, end, lag, at."""
        return self._table(lambda tables: tables.offsets(group))

    def ownership(self, group: str | None = None) -> pd.DataFrame:
        """Return group, topic, partition, member, since, until, state: the last hour of it."""
        return self._table(lambda tables: tables.ownership(group))

    def members(self, group: str | None = None) -> pd.DataFrame:
        """Return group, member, id, client, host, protocol, epoch (or generation), state."""
        return self._table(lambda tables: tables.members(group))

    def _table(self, read: Callable[[Tables], pd.DataFrame]) -> pd.DataFrame:
        if not self._caught_up and not self.closed:
            with Progress("Reading what the groups did so far"), suppress(LabError):
                self.wait_until_current()  # if it cannot, what is known so far is better than none
        with self._lock:
            if self._problem is not None and not self._tables.groups:
                raise self._problem
            for note in self._notes():
                print(f"note: {note}")
            return read(self._tables)

    def _notes(self) -> list[str]:
        found = [f"topic {topic!r} was deleted" for topic in sorted(self._tables.deleted)]
        if self.closed:
            found.append("this watch is closed; the tables are as they were then")
        elif self._problem is not None:
            found.append(f"{self._problem.what}; {self._problem.to_do}")
        return found

    def wait_until_current(self, timeout: float = CURRENT_WITHIN) -> None:
        """Wait until all that was in the offsets topic at the call, and a new sample, are in."""
        self._check_open()
        deadline = time.monotonic() + timeout
        ends: dict[int, int] | None = None
        rounds: int | None = None
        while True:
            if ends is None:
                with suppress(LabError):
                    ends = self._sampler.committed_ends()
            elif rounds is None:
                read = self._read_up_to() if ends else {}
                if all(read.get(partition, 0) >= end for partition, end in ends.items()):
                    # Then a sample of all that the groups named; the one under way may not be.
                    rounds, self._hurry = self._rounds + 2, 2
            elif self._rounds >= rounds:
                self._caught_up = True
                return
            if self._stream_problem is not None:
                raise self._stream_problem
            if time.monotonic() > deadline:
                raise self._problem or LabError(
                    f"the watch was not current after {timeout:.0f} s",
                    "give more time with timeout=, or look at the watch (just type its name)",
                )
            time.sleep(0.02)

    def save(self, path: str | Path) -> Path:
        """Write what was seen to one small file, which ``labkit.open`` reads anywhere."""
        with self._lock:
            return self._history.save(Path(path))

    def show(self, group: str | None = None, **options: Any) -> View:
        """Show who owns what, live, for one group or for all."""
        self._check_open()
        view = View(self._still, group, **options)
        self._views.append(view)
        return view

    def playback(self, group: str | None = None) -> View:
        """Show what was seen so far, with a slider: go back, step, play it again."""
        view = View(self._still, group, past=True)
        self._views.append(view)
        return view

    @contextmanager
    def _still(self) -> Iterator[Tables]:
        with self._lock:
            yield self._tables

    def _check_open(self) -> None:
        if self.closed:
            raise LabError("this watch is closed", "open a new one with cluster.watch()")

    def __repr__(self) -> str:
        with self._lock:
            groups = self._tables.groups
            lines = [f"watch of {self._cluster._bootstrap}: {len(groups)} groups, " + self._state()]
            lines += [f"  {name}: {len(g.members)} members" for name, g in sorted(groups.items())]
            lines += [f"  note: {note}" for note in self._notes()]
            lines += [f"  not understood: {what}" for what in self._tables.unknown[-3:]]
            return "\n".join(lines)

    def _state(self) -> str:
        if self.closed:
            return "closed"
        if self._problem is not None:
            return "in trouble"
        waiting = f"waiting for the first group (there is no {log.OFFSETS}, or it may not be seen)"
        return waiting if self._query is None else "live"

    # --- the end ----------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the watch was closed."""
        return self._closing.is_set()

    def close(self) -> None:
        """Stop the stream; the tables stay as they are."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join(15)  # the longest that one of its questions may take
        if self._query is not None:
            with suppress(Exception):  # whatever Spark has to say about a stream that we stop
                self._query.stop()
        self._tail.close()
        for view in self._views:
            view.end()
        shutil.rmtree(self._checkpoint, ignore_errors=True)

    # --- the stream -------------------------------------------------------------------------------

    def _run(self) -> None:
        sampled = forgot = 0.0
        reports = _Reports(self._cluster)
        while not self._closing.wait(TICK):
            try:
                self._take(reports.read())
                if self._hurry > 0 or time.monotonic() - sampled >= SAMPLE_EVERY:
                    sampled = time.monotonic()
                    self._hurry -= 1
                    self._sample()
                    self._look_after_query()
                    self._rounds += 1
                    self._problem = self._stream_problem
                if time.monotonic() - forgot >= FORGET_EVERY:
                    forgot = time.monotonic()
                    with self._lock:
                        self._tables.forget()
                        self._history.trim()
            except LabError as problem:
                self._problem = problem
            except Exception as error:  # a watch never takes the notebook down with it
                self._problem = LabError(
                    f"the watch could not look ({type(error).__name__}: {error})",
                    "it goes on trying; cluster.watch() opens a new one after close()",
                )

    def _sample(self) -> None:
        with self._lock:
            wanted = {
                self._tables.ids.get(topic, topic)
                for group in self._tables.groups.values()
                for topic, _ in (*group.committed, *group.owners)
            }
        self._take(self._sampler.sample(wanted))
        if self._query is not None:
            self._take(self._tail.read(self._sampler.open_transactions(), self._read_up_to()))

    def _look_after_query(self) -> None:
        if self._query is not None and not self._query.isActive:
            self._stream_problem = _told(self._query.exception())
            self._query, self._retry_at = None, time.monotonic() + RETRY_AFTER
        if self._query is None and self._sampler.partitions and time.monotonic() > self._retry_at:
            self._start_query()

    def _start_query(self) -> None:
        options = log.options(
            self._cluster._living_addresses(), self._cluster._client, self._sampler.partitions
        )
        self._query = (
            self._spark.readStream.format("kafka")
            .options(**options, maxOffsetsPerTrigger="200000")
            .load()
            .select(*log.COLUMNS)
            .writeStream.foreachBatch(self._batch)
            .option("checkpointLocation", str(self._checkpoint))
            .trigger(processingTime=TRIGGER)
            .start()
        )

    def _batch(self, records: Any, number: int) -> None:
        try:
            for batch in decode(iter(records.toArrow().to_batches())):
                self._take(self._unseen(batch))
            self._stream_problem = None
        except Exception:
            if not self._closing.is_set():  # a batch that is cut off by stop() is no news
                raise

    def _unseen(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Leave out what a repeated batch, or the tail of an open transaction, brought already."""
        partitions = batch.column("log_partition").to_pylist()
        offsets, kinds = batch.column("log_offset").to_pylist(), batch.column("kind").to_pylist()
        keep = [
            offset > self._seen[partition]
            and (kind == "commit" or offset > self._tail.ahead[partition])
            for partition, offset, kind in zip(partitions, offsets, kinds)
        ]
        for partition, offset in zip(partitions, offsets):
            self._seen[partition] = max(self._seen[partition], offset)
        return batch if all(keep) else batch.filter(pa.array(keep))

    def _take(self, events: pa.RecordBatch | None) -> None:
        if events is None or not events.num_rows:
            return
        with self._lock:
            self._tables.take([events])
            self._history.add(events)

    def _read_up_to(self) -> dict[int, int]:
        """Return how far the stream has read each partition of the offsets topic."""
        progress = self._query.lastProgress if self._query is not None else None
        if not progress or not progress["sources"]:
            return {}
        ends = progress["sources"][0]["endOffset"]
        ends = json.loads(ends) if isinstance(ends, str) else ends
        return {int(p): int(end) for p, end in (ends or {}).get(log.OFFSETS, {}).items()}


def _told(error: object) -> LabError:
    """Say in two lines why Spark gave up."""
    text = str(error)
    if "uthoriz" in text:
        return LabError(
            f"{log.OFFSETS} may not be read here, and all that a watch knows stands in it",
            "ask for the rights to Describe and Read this topic (an ACL)",
        )
    first = next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
    return LabError(
        f"Spark's stream stopped: {first[:200]}",
        f"it is started again every {RETRY_AFTER:.0f} s while the cluster answers",
    )


class _Reports:
    """What this lab's members and their parents wrote down since the last look."""

    def __init__(self, cluster: Cluster) -> None:
        self._file = cluster._folder / "reports.jsonl" if cluster._folder else None
        self._read = 0
        self._rest = b""

    def read(self) -> pa.RecordBatch | None:
        if self._file is None or not self._file.exists():
            return None
        with self._file.open("rb") as file:
            file.seek(self._read)
            data = file.read(4_000_000)
        self._read += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        found = []
        for line in lines:
            with suppress(ValueError):  # a line that its writer's end cut short
                found.append(json.loads(line))
        return batch_of(event | {"detail": json.dumps(event["detail"])} for event in found)
