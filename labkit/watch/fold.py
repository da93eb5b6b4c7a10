"""Fold events into tables: who owns what since when, how far each group has read, who is in it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd
import pyarrow as pa

from labkit.errors import LabError, nearest
from labkit.watch.decode import condense
from labkit.watch.group import Group, Place, dump, fold, load

WINDOW = 3_600_000  # milliseconds of history that are kept; what is current is kept always


class Tables:
    """All groups of a cluster, and its topics, from the events taken so far."""

    def __init__(self, window: int = WINDOW) -> None:
        self.window = window
        self.groups: dict[str, Group] = {}
        self.ids: dict[str, str] = {}  # topic ids to names
        self.sizes: dict[str, int] = {}  # how many partitions a topic has
        self.deleted: set[str] = set()  # topics that were there
        self.logs: dict[Place, list[int]] = {}  # start, end
        self.unknown: list[str] = []  # records that could not be read: what, and why
        self.now = 0  # the time of the newest event
        self.revision = 0  # counts what was taken, for whoever redraws

    def take(self, batches: Iterable[pa.RecordBatch]) -> None:
        """Fold events, in the order in which they came."""
        for batch in condense(iter(batches)):
            rows = zip(*(column.to_pylist() for column in batch.columns))
            for group, kind, topic, partition, offset, member, epoch, detail, at, _, place in rows:
                if at > self.now:
                    self.now = at
                if group is None:
                    self._sample(kind, topic, partition, offset, detail, at)
                    continue
                known = self.groups.get(group)
                if known is None or known.is_gone(self.now - self.window):
                    known = self.groups[group] = Group(group)
                if kind == "commit":
                    known.commit((topic, partition), offset, at, place or 0)
                else:
                    told = json.loads(detail) if detail is not None else None
                    fold(known, kind, member, epoch, told, at, place)
                    if kind == "unknown":
                        self._note(group, told)
        self.revision += 1

    def _note(self, group: str | None, told: Any) -> None:
        self.unknown = [*self.unknown, f"group {group!r}: {told['why']}"][-100:]

    def _sample(
        self, kind: str, topic: str, partition: int, offset: int | None, detail: Any, at: int
    ) -> None:
        told = json.loads(detail) if detail is not None else None
        if kind == "topic" and told is not None:
            self.ids[told["id"]] = topic
            self.sizes[topic] = told["partitions"]
            self.deleted.discard(topic)
        elif kind == "topic":
            self.sizes.pop(topic, None)
            self.deleted.add(topic)
            self.logs = {place: log for place, log in self.logs.items() if place[0] != topic}
            for group in self.groups.values():
                group.lose([p for p in group.owners if self.ids.get(p[0], p[0]) == topic], at)
        elif kind == "log" and told is not None and offset is not None:
            self.logs[topic, partition] = [told["start"], offset]
        elif kind == "unknown":
            self._note(None, told)

    def forget(self) -> None:
        """Drop what is older than the window."""
        self.groups = self._living()
        for group in self.groups.values():
            group.forget(self.now - self.window)

    def _living(self) -> dict[str, Group]:
        begin = self.now - self.window
        return {name: group for name, group in self.groups.items() if not group.is_gone(begin)}

    # --- the tables -------------------------------------------------------------------------------

    def offsets(self, group: str | None = None) -> pd.DataFrame:
        """Return group, topic, partition, start, committed, position, end, lag, at."""
        rows = [(g.name, *row) for g in self._chosen(group) for row in self.progress(g)]
        columns = ["group", "topic", "partition", "start", "committed", "position", "end", "lag"]
        table = pd.DataFrame(rows, columns=[*columns, "at"])
        for column in columns[3:]:
            table[column] = table[column].astype("Int64")
        return table.assign(at=_times(table["at"]))

    def progress(self, g: Group) -> Iterator[tuple[Any, ...]]:
        """Yield topic, partition, start, committed, position, end, lag, at of one group."""
        owners: dict[Place, set[str | None]] = {}
        for (topic, partition), names in g.owners.items():
            owners.setdefault((self.ids.get(topic, topic), partition), set()).update(names)
        owned = {p for p, names in owners.items() if names != {None} and g.protocol != "share"}
        for place in sorted(set(g.committed) | owned):
            if place[0] in self.deleted:
                continue
            offset, at, _ = g.committed.get(place, (None, None, None))
            position, member = g.position.get(place, (None, None))
            if member not in owners.get(place, ()):
                position = None
            start, end = self.logs.get(place, (None, None))
            known = [n for n in (offset, position, end) if n is not None]
            end = max(known) if end is not None else None  # a commit may be newer than a sample
            lag = end - offset if end is not None and offset is not None else None
            yield (*place, start, offset, position, end, lag, at)

    def ownership(self, group: str | None = None) -> pd.DataFrame:
        """Return group, topic, partition, member, since, until, state, oldest first."""
        begin = self.now - self.window
        rows = [(g.name, *row) for g in self._chosen(group) for row in g.spans(self.ids, begin)]
        columns = ["group", "topic", "partition", "member", "since", "until", "state"]
        table = pd.DataFrame(rows, columns=columns)
        return table.assign(since=_times(table.since), until=_times(table.until))

    def members(self, group: str | None = None) -> pd.DataFrame:
        """Return group, member, id, client, host, protocol, epoch (or generation), state."""
        rows = [
            (
                g.name,
                m.name,
                id,
                m.client,
                m.host,
                g.protocol,
                m.epoch,
                g.fault_of(m.name) or m.state,
            )
            for g in self._chosen(group)
            for id, m in g.members.items()
        ]
        columns = ["group", "member", "id", "client", "host", "protocol", "epoch", "state"]
        table = pd.DataFrame(rows, columns=columns).sort_values(["group", "member"])
        return table.astype({"epoch": "Int64"}).reset_index(drop=True)

    def marks(self, group: str | None = None) -> pd.DataFrame:
        """Return group, at, kind, about: joins, faults and generations, oldest first."""
        begin = self.now - self.window
        rows = [(g.name, *event) for g in self._chosen(group) for event in g.events(begin)]
        table = pd.DataFrame(rows, columns=["group", "at", "kind", "about"])
        return table.assign(at=_times(table["at"]))

    def _chosen(self, group: str | None) -> list[Group]:
        groups = self._living()
        if group is None:
            return [groups[name] for name in sorted(groups)]
        if group not in groups:
            seen = ", ".join(sorted(groups)) or "none yet"
            raise LabError(
                f"no group {group!r} has been seen{nearest(group, groups)}",
                f"the groups seen so far: {seen}",
            )
        return [groups[group]]

    # --- as text, for a trace and for Spark -------------------------------------------------------

    def to_json(self) -> str:
        """Return everything as JSON."""
        told = {
            "window": self.window,
            "now": self.now,
            "ids": self.ids,
            "sizes": self.sizes,
            "deleted": sorted(self.deleted),
            "logs": list(self.logs.items()),
            "unknown": self.unknown,
            "groups": [dump(group) for group in self.groups.values()],
        }
        return json.dumps(told)

    @classmethod
    def from_json(cls, text: str) -> Tables:
        """Return what ``to_json`` wrote."""
        told = json.loads(text)
        tables = cls(told["window"])
        tables.now, tables.ids, tables.sizes = told["now"], told["ids"], told["sizes"]
        tables.unknown, tables.deleted = told["unknown"], set(told["deleted"])
        tables.logs = {(topic, partition): log for (topic, partition), log in told["logs"]}
        tables.groups = {group["name"]: load(group) for group in told["groups"]}
        return tables


def _times(column: pd.Series[Any]) -> pd.Series[Any]:
    return pd.to_datetime(column.astype("Int64"), unit="ms", utc=True)
