"""Decode the records of ``__consumer_offsets``: one function on Arrow batches.

Written from the schemas in kafka-group-coordinator's jar (common/message/*.json). A key begins with
the type of its record, a value with its version; whatever is not known becomes a row that says so.
"""

from __future__ import annotations

import json
import struct
import uuid
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# A row is a record of the log, a sample of the cluster or a report of a member.
EVENTS = pa.schema(
    [
        ("group", pa.string()),
        ("kind", pa.string()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),  # of a commit: null when the coordinator forgot it
        ("member", pa.string()),
        ("epoch", pa.int32()),  # generation or epoch
        ("detail", pa.string()),  # JSON: what only the rarer kinds have; null for a tombstone
        ("at", pa.int64()),  # milliseconds since 1970
        ("log_partition", pa.int32()),
        ("log_offset", pa.int64()),
    ]
)
SCHEMA = (  # the same for Spark, whose own conversion would ask for a running session
    "`group` string, kind string, topic string, partition int, offset bigint, member string, "
    "epoch int, detail string, at bigint, log_partition int, log_offset bigint"
)

_INT16, _INT32, _INT64 = struct.Struct(">h"), struct.Struct(">i"), struct.Struct(">q")


class Reader:
    """Read Kafka's primitive types from bytes, in the classic or the flexible encoding."""

    def __init__(self, data: bytes, position: int, flexible: bool) -> None:
        self.data, self.position, self.flexible = data, position, flexible

    def number(self, kind: struct.Struct = _INT32) -> int:
        (value,) = kind.unpack_from(self.data, self.position)
        self.position += kind.size
        return int(value)

    def take(self, count: int) -> bytes:
        if count < 0 or self.position + count > len(self.data):
            raise ValueError("the record ends too early")
        self.position += count
        return self.data[self.position - count : self.position]

    def varint(self) -> int:
        value = shift = 0
        while True:
            (byte,) = self.take(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def _length(self, kind: struct.Struct) -> int:
        return self.varint() - 1 if self.flexible else self.number(kind)

    def string(self) -> str | None:
        length = self._length(_INT16)
        return None if length < 0 else self.take(length).decode("utf-8", "replace")

    def blob(self) -> bytes:
        return self.take(self._length(_INT32))

    def array(self, item: Callable[[], Any]) -> list[Any]:
        return [item() for _ in range(self._length(_INT32))]

    def skip_tags(self) -> None:
        for _ in range(self.varint() if self.flexible else 0):
            self.varint()
            self.take(self.varint())

    def topic(self) -> tuple[str, list[int]]:
        """Read a topic's id and partitions, and step over what newer versions add to it."""
        found = str(uuid.UUID(bytes=self.take(16))), self.array(self.number)
        self.skip_tags()
        return found


def _value(data: bytes, flexible_from: int = 0, last: int = 0) -> tuple[int, Reader]:
    (version,) = _INT16.unpack_from(data)
    if not 0 <= version <= last:
        raise ValueError(f"version {version} of its value is not known")
    return version, Reader(data, 2, version >= flexible_from)


def _commit(data: bytes) -> tuple[int, int | None]:
    version, reader = _value(data, 4, 4)
    offset, epoch = reader.number(_INT64), reader.number() if version >= 3 else None
    reader.string()  # metadata
    reader.take(16 if version == 1 else 8)  # times
    reader.skip_tags()
    return offset, epoch


def _generation(data: bytes) -> tuple[int, dict[str, Any]]:
    """Return the generation of a classic group, and its protocol, leader and members."""
    version, reader = _value(data, 4, 4)
    kind, generation = reader.string(), reader.number()
    protocol, leader = reader.string(), reader.string()
    if version >= 2:
        reader.number(_INT64)

    def member() -> dict[str, Any]:
        found: dict[str, Any] = {"id": reader.string()}
        if version >= 3:
            reader.string()  # the instance id
        found |= {"client": reader.string(), "host": reader.string()}
        reader.take(8 if version >= 1 else 4)  # time-outs
        reader.blob()
        assignment = reader.blob()
        found["assigned"] = _assignment(assignment) if kind == "consumer" and assignment else {}
        reader.skip_tags()
        return found

    members = reader.array(member)
    reader.skip_tags()
    return generation, {"protocol": protocol, "leader": leader, "members": members}


def _assignment(data: bytes) -> dict[str, list[int]]:
    """Read a classic member's assignment: topics by name, as its group's leader wrote it."""
    reader = Reader(data, 2, False)
    return dict(reader.array(lambda: (reader.string(), reader.array(reader.number))))


def _member(data: bytes, shared: bool) -> tuple[None, dict[str, Any]]:
    _, reader = _value(data)
    for _ in range(1 if shared else 2):
        reader.string()  # the instance id, the rack
    found = {"client": reader.string(), "host": reader.string()}
    reader.array(reader.string)
    if not shared:
        reader.string(), reader.number(), reader.string()  # pattern, time-out, assignor
    reader.skip_tags()
    return None, found


def _current(data: bytes, can_revoke: bool) -> tuple[int, dict[str, Any]]:
    """Return a member's epoch, state, and the partitions it has or has still to give up."""
    _, reader = _value(data)
    epoch, _, state = reader.number(), reader.number(), reader.take(1)[0]
    assigned = dict(reader.array(reader.topic))
    revoking = dict(reader.array(reader.topic)) if can_revoke else {}
    reader.skip_tags()
    return epoch, {"state": state, "assigned": assigned, "revoking": revoking}


def _target(data: bytes) -> tuple[None, dict[str, Any]]:
    _, reader = _value(data)
    assigned = dict(reader.array(reader.topic))
    reader.skip_tags()
    return None, {"assigned": assigned}


def _epoch(data: bytes, hashed: bool = False) -> tuple[int, dict[str, Any]]:
    _, reader = _value(data)
    epoch = reader.number()
    if hashed:
        reader.take(8)  # the hash of its topics, a tag in the records of others
    reader.skip_tags()
    return epoch, {}


def _nothing(data: bytes) -> tuple[None, dict[str, Any]]:
    """Only check the version: nobody asks what else the record says."""
    _value(data)
    return None, {}


# The type of a key: the kind of row, how many strings its key has, what its value says.
_KINDS: dict[int, tuple[str, int, Callable[[bytes], tuple[int | None, dict[str, Any]]]]] = {
    2: ("generation", 1, _generation),
    3: ("epoch", 1, _epoch),
    4: ("partition metadata", 1, _nothing),
    5: ("member", 2, lambda data: _member(data, False)),
    6: ("target epoch", 1, _epoch),
    7: ("target", 2, _target),
    8: ("current", 2, lambda data: _current(data, True)),
    10: ("share member", 2, lambda data: _member(data, True)),
    11: ("share epoch", 1, lambda data: _epoch(data, True)),
    12: ("share target epoch", 1, _epoch),
    13: ("share target", 2, _target),
    14: ("share current", 2, lambda data: _current(data, False)),
    15: ("share state", 1, _nothing),
    16: ("regular expression", 2, _nothing),
}


def decode(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Turn batches of raw records (key, value, timestamp, partition, offset) into events.

    This is the function that Spark's ``mapInArrow`` takes. Few keys are written again and again,
    and nearly all values are commits of one shape: those are decoded by the column.
    """
    for batch in batches:
        coded = batch.column("key").dictionary_encode()
        keys = [*coded.dictionary.to_pylist(), None]
        known = [_key(key) for key in keys]
        codes = coded.indices.fill_null(len(keys) - 1)
        plain, offsets, epochs = _plain_commits(batch.column("value"))
        plain &= np.array([names[0] == 1 for names in known])[codes.to_numpy()]
        columns = [
            pa.array(column, EVENTS.field(i).type).take(codes)
            for i, column in enumerate(zip(*(names[1] for names in known)))
        ]
        columns[4] = pa.array(offsets, mask=~plain)
        columns[6] = pa.array(epochs, mask=~plain)
        others = np.flatnonzero(~plain)
        if len(others):
            values = batch.column("value").take(pa.array(others)).to_pylist()
            rows = [
                _event(known[code], keys[code], value)
                for code, value in zip(codes.to_numpy()[others].tolist(), values)
            ]
            mask = pa.array(~plain)
            columns = [
                pc.replace_with_mask(column, mask, pa.array(given, column.type))
                for column, given in zip(columns, zip(*rows))
            ]
        at = pc.divide(batch.column("timestamp").cast(pa.timestamp("us")).cast(pa.int64()), 1000)
        places = [batch.column("partition"), batch.column("offset")]
        yield pa.RecordBatch.from_arrays([*columns, at, *places], schema=EVENTS)


def _plain_commits(values: pa.Array) -> tuple[Any, Any, Any]:
    """Find the values that are commits of version 4, whole and with no more than a topic id added.

    Return which they are, and for these the offset and the leader's epoch.
    """
    _, ends, data = values.buffers()
    first, last = values.offset, values.offset + len(values) + 1
    places = np.frombuffer(ends, np.int32)[first:last].astype(np.int64)
    begin, length = places[:-1], np.diff(places)
    # So that a look beyond the end of a short value stays within the array.
    content = np.concatenate([np.frombuffer(data or b"", np.uint8), np.zeros(320, np.uint8)])
    metadata = content[begin + 14].astype(np.int64)  # its length and one
    rest, left = begin + 22 + metadata, length - 22 - metadata
    tagged = (content[rest] == 1) & (content[rest + 1] == 0) & (content[rest + 2] == 16)
    plain = (
        (content[begin] == 0)
        & (content[begin + 1] == 4)
        & (metadata < 128)
        & (((left == 1) & (content[rest] == 0)) | ((left == 19) & tagged))
    )
    offsets = content[begin[:, None] + np.arange(2, 10)].view(">i8").ravel().astype(np.int64)
    epochs = content[begin[:, None] + np.arange(10, 14)].view(">i4").ravel().astype(np.int32)
    return plain, offsets, epochs


Known = tuple[int, tuple[Any, ...], str]  # a key's type, what it says of the row, what is wrong


def _event(known: Known, key: bytes | None, value: bytes | None) -> tuple[Any, ...]:
    """Return group, kind, topic, partition, offset, member, epoch, detail of one record."""
    kind, (group, name, topic, partition, _, member, _, _), wrong = known
    try:
        if wrong:
            raise ValueError(wrong)
        if kind <= 1:
            offset, epoch = _commit(value) if value is not None else (None, None)
            return (group, name, topic, partition, offset, None, epoch, None)
        if value is None:
            return (group, name, None, None, None, member, None, None)
        epoch, detail = _KINDS[kind][2](value)
        return (group, name, None, None, None, member, epoch, json.dumps(detail))
    except (ValueError, IndexError, struct.error) as error:
        what = {"why": str(error), "key": (key or b"").hex(), "value": (value or b"").hex()}
        return (group, "unknown", None, None, None, None, None, json.dumps(what))


def _key(key: bytes | None) -> Known:
    """Read a key; of one that is not understood, say why."""
    try:
        if key is None:
            raise ValueError("it has no key")
        (kind,) = _INT16.unpack_from(key)
        reader = Reader(key, 2, False)
        names: tuple[Any, ...]
        if 0 <= kind <= 1:
            group, topic = reader.string(), reader.string()
            names = (group, "commit", topic, reader.number(), None, None, None, None)
            missing = group is None or topic is None
        elif kind in _KINDS:
            name, strings, _ = _KINDS[kind]
            group, *others = (reader.string() for _ in range(strings))
            names = (group, name, None, None, None, *(others or [None]), None, None)
            missing = group is None or others == [None]
        else:
            raise ValueError(f"type {kind} of its key is not known")
        if missing:
            raise ValueError("a name is missing in its key")
        return kind, names, ""
    except (ValueError, struct.error) as error:
        return -1, (None, "unknown", *[None] * 6), str(error)


def condense(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Leave out each commit that another one follows before anything else happens.

    No table shows it; without it, a long log is folded in a fraction of the time.
    """
    for batch in batches:
        # Rows with the same number of other events before them stand between the same two.
        is_commit = pc.equal(batch.column("kind"), "commit")
        # Not when it is forgotten: the commit before that is the last sign of its owner.
        commit = pc.and_(is_commit, pc.is_valid(batch.column("offset"))).to_numpy(False)
        if np.count_nonzero(commit) > 100:
            numbered = {"row": np.arange(len(commit)), "run": np.cumsum(~commit)}
            keys = {name: batch.column(name) for name in ("group", "topic", "partition")}
            commits = pa.table(keys | numbered).filter(pa.array(commit))
            last = commits.group_by([*keys, "run"]).aggregate([("row", "max")])["row_max"]
            rows = np.concatenate([last.to_numpy(), np.flatnonzero(~commit)])
            batch = batch.take(pa.array(np.sort(rows)))
        yield batch


def batch_of(events: Iterable[dict[str, Any]]) -> pa.RecordBatch | None:
    """Return events from elsewhere as a batch, what they do not say left empty."""
    rows = [{name: event.get(name) for name in EVENTS.names} for event in events]
    return pa.RecordBatch.from_pylist(rows, schema=EVENTS) if rows else None
