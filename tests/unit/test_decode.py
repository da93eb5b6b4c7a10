"""The decoder on records built by hand from the schemas: whole, cut short, from the future."""

from __future__ import annotations

import json
import struct
import uuid
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from labkit.watch.decode import EVENTS, batch_of, decode

RAW = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
    ]
)
AT = 1_790_000_000_123
TOPIC = uuid.UUID("0f5f6a3e-8f3b-4f0a-9d55-3f4d1a2b3c4d")


def rows(*records: tuple[bytes | None, bytes | None]) -> list[dict[str, Any]]:
    """Decode records as if they stood one after the other in partition 3, from offset 100."""
    at = datetime.fromtimestamp(AT / 1000, UTC)
    raw = [dict(zip(RAW.names, (*r, at, 3, 100 + i))) for i, r in enumerate(records)]
    (events,) = decode(iter([pa.RecordBatch.from_pylist(raw, schema=RAW)]))
    assert events.schema == EVENTS
    return list(events.to_pylist())


def row(key: bytes | None, value: bytes | None) -> dict[str, Any]:
    """Decode one record; what it is about, without its place in the log."""
    (found,) = rows((key, value))
    assert (found.pop("at"), found.pop("log_partition"), found.pop("log_offset")) == (AT, 3, 100)
    if found["detail"] is not None:
        found["detail"] = json.loads(found["detail"])
    return found


def event(group: str | None, kind: str, **more: Any) -> dict[str, Any]:
    """Return the row that is expected, what is not named being empty."""
    return dict.fromkeys(EVENTS.names[:8]) | {"group": group, "kind": kind} | more


# --- writing Kafka's types, the classic way and the flexible one ----------------------------------


def int16(number: int) -> bytes:
    return struct.pack(">h", number)


def int32(number: int) -> bytes:
    return struct.pack(">i", number)


def int64(number: int) -> bytes:
    return struct.pack(">q", number)


def varint(number: int) -> bytes:
    low, high = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + varint(high) if high else bytes([low])


class Writer:
    """How lengths are written in one version of a record."""

    def __init__(self, flexible: bool) -> None:
        self.flexible = flexible

    def string(self, text: str | None) -> bytes:
        data = (text or "").encode()
        length = -1 if text is None else len(data)
        return (varint(length + 1) if self.flexible else int16(length)) + data

    def blob(self, data: bytes) -> bytes:
        return (varint(len(data) + 1) if self.flexible else int32(len(data))) + data

    def array(self, *items: bytes) -> bytes:
        length = varint(len(items) + 1) if self.flexible else int32(len(items))
        return length + b"".join(items)

    def tags(self, *tags: tuple[int, bytes]) -> bytes:
        if not self.flexible:
            return b""
        return varint(len(tags)) + b"".join(
            varint(tag) + varint(len(data)) + data for tag, data in tags
        )


CLASSIC, FLEXIBLE = Writer(False), Writer(True)


def key(kind: int, *names: str | int) -> bytes:
    parts = [CLASSIC.string(name) if isinstance(name, str) else int32(name) for name in names]
    return int16(kind) + b"".join(parts)


def commit(version: int, metadata: str = "", topic_id: uuid.UUID | None = None) -> bytes:
    """Return a commit of offset 4711 in one of its five versions."""
    write = Writer(version >= 4)
    return b"".join(
        [
            int16(version) + int64(4711),
            int32(5) if version >= 3 else b"",
            write.string(metadata) + int64(AT),
            int64(AT + 1) if version == 1 else b"",
            write.tags((0, topic_id.bytes)) if topic_id else write.tags(),
        ]
    )


def assignment(topics: dict[str, list[int]]) -> bytes:
    """Return an assignment as a classic group's leader writes it, whatever the record's version."""
    return (
        int16(3)
        + CLASSIC.array(
            *(CLASSIC.string(t) + CLASSIC.array(*map(int32, ps)) for t, ps in topics.items())
        )
        + int32(-1)
    )


def generation(version: int, members: int = 2, kind: str = "consumer") -> bytes:
    """Return the seventh generation of a classic group in one of its five versions."""
    write = Writer(version >= 4)
    told = [
        b"".join(
            [
                write.string(f"id-{i}"),
                write.string("static" if i else None) if version >= 3 else b"",
                write.string(f"client-{i}") + write.string("/127.0.0.1"),
                int32(60_000) if version >= 1 else b"",
                int32(10_000),
                write.blob(b"what it subscribed to"),
                write.blob(assignment({"orders": [i, i + 2], "bills": [i]})),
                write.tags(),
            ]
        )
        for i in range(members)
    ]
    return b"".join(
        [
            int16(version) + write.string(kind) + int32(7),
            write.string("range") + write.string("id-0"),
            int64(AT) if version >= 2 else b"",
            write.array(*told) + write.tags(),
        ]
    )


def topics(epochs: bool = False) -> bytes:
    """Return a list of one topic's partitions 1 and 4, with the epochs that newer brokers add."""
    tags = FLEXIBLE.tags((0, FLEXIBLE.array(int32(3), int32(4)))) if epochs else FLEXIBLE.tags()
    return FLEXIBLE.array(TOPIC.bytes + FLEXIBLE.array(int32(1), int32(4)) + tags)


EMPTY = FLEXIBLE.array()
HAS = {str(TOPIC): [1, 4]}
FACES = FLEXIBLE.string("shipping-1") + FLEXIBLE.string("/10.0.0.1")
MEMBER = {"client": "shipping-1", "host": "/10.0.0.1"}
HASH = (0, int64(99))
NAMED = TOPIC.bytes + FLEXIBLE.string("orders")

# A key and a value of each type but commits and generations, and the row they make.
SERVER_SIDE = {
    "epoch": (
        key(3, "g"),
        int16(0) + int32(12) + FLEXIBLE.tags(HASH),
        event("g", "epoch", epoch=12, detail={}),
    ),
    "partition metadata": (
        key(4, "g"),
        int16(0) + FLEXIBLE.array(NAMED + int32(6) + EMPTY + b"\0") + FLEXIBLE.tags(),
        event("g", "partition metadata", detail={}),
    ),
    "member": (
        key(5, "g", "m"),
        int16(0)
        + (FLEXIBLE.string(None) + FLEXIBLE.string("rack") + FACES)
        + FLEXIBLE.array(FLEXIBLE.string("orders"), FLEXIBLE.string("bills"))
        + (FLEXIBLE.string(None) + int32(45_000) + FLEXIBLE.string("uniform"))
        + FLEXIBLE.tags((0, b"\1" + int32(9) + EMPTY + b"\0")),
        event("g", "member", member="m", detail=MEMBER),
    ),
    "target epoch": (
        key(6, "g"),
        int16(0) + int32(13) + FLEXIBLE.tags(HASH),
        event("g", "target epoch", epoch=13, detail={}),
    ),
    "target": (
        key(7, "g", "m"),
        int16(0) + topics() + FLEXIBLE.tags(),
        event("g", "target", member="m", detail={"assigned": HAS}),
    ),
    "current": (
        key(8, "g", "m"),
        int16(0) + int32(14) + int32(13) + b"\1" + topics(True) + topics() + FLEXIBLE.tags(),
        event(
            "g",
            "current",
            member="m",
            epoch=14,
            detail={"state": 1, "assigned": HAS, "revoking": HAS},
        ),
    ),
    "share member": (
        key(10, "g", "m"),
        int16(0)
        + (FLEXIBLE.string(None) + FACES + FLEXIBLE.array(FLEXIBLE.string("orders")))
        + FLEXIBLE.tags(),
        event("g", "share member", member="m", detail=MEMBER),
    ),
    "share epoch": (
        key(11, "g"),
        int16(0) + int32(2) + int64(99) + FLEXIBLE.tags(),
        event("g", "share epoch", epoch=2, detail={}),
    ),
    "share target epoch": (
        key(12, "g"),
        int16(0) + int32(3) + FLEXIBLE.tags(HASH),
        event("g", "share target epoch", epoch=3, detail={}),
    ),
    "share target": (
        key(13, "g", "m"),
        int16(0) + topics() + FLEXIBLE.tags(),
        event("g", "share target", member="m", detail={"assigned": HAS}),
    ),
    "share current": (
        key(14, "g", "m"),
        int16(0) + int32(4) + int32(3) + b"\0" + topics() + FLEXIBLE.tags(),
        event(
            "g",
            "share current",
            member="m",
            epoch=4,
            detail={"state": 0, "assigned": HAS, "revoking": {}},
        ),
    ),
    "share state": (
        key(15, "g"),
        int16(0)
        + FLEXIBLE.array(NAMED + FLEXIBLE.array(int32(0)) + b"\0")
        + (EMPTY + FLEXIBLE.array(NAMED + b"\0") + FLEXIBLE.tags()),
        event("g", "share state", detail={}),
    ),
    "regular expression": (
        key(16, "g", "ord.*"),
        int16(0) + FLEXIBLE.array(FLEXIBLE.string("orders")) + int64(1) + int64(AT) + b"\0",
        event("g", "regular expression", member="ord.*", detail={}),
    ),
}
UNREAD = ("partition metadata", "share state", "regular expression")  # only their version is read
COMMIT_KEY = key(1, "g", "orders", 3)
COMMITTED = event("g", "commit", topic="orders", partition=3, offset=4711)


# --- commits --------------------------------------------------------------------------------------


def test_a_commit_of_kafka_4_1_that_blinded_other_decoders_is_read():
    value = bytes.fromhex("0004000000000021d4a8ffffffff010000019964f2d83600")
    assert row(COMMIT_KEY, value) == COMMITTED | {"offset": 0x21D4A8, "epoch": -1}


@pytest.mark.parametrize("metadata", ["", "why not", "ü" * 200, "x" * 126, "x" * 127, "\0"])
@pytest.mark.parametrize("version", range(5))
def test_every_version_of_a_commit_is_read(version, metadata):
    expected = COMMITTED | {"epoch": 5 if version >= 3 else None}
    assert row(COMMIT_KEY, commit(version, metadata)) == expected


@pytest.mark.parametrize("metadata", ["", "x" * 104, "x" * 300])
def test_a_commit_with_a_topic_id_is_read(metadata):
    assert row(COMMIT_KEY, commit(4, metadata, TOPIC)) == COMMITTED | {"epoch": 5}


def test_a_commit_with_a_key_of_old_is_read():
    assert row(key(0, "g", "orders", 3), commit(0)) == COMMITTED


def test_a_forgotten_commit_is_a_row_without_an_offset():
    assert row(COMMIT_KEY, None) == COMMITTED | {"offset": None}


# --- generations of classic groups ----------------------------------------------------------------


@pytest.mark.parametrize("members", [0, 1, 2, 130])
@pytest.mark.parametrize("version", range(5))
def test_every_version_of_a_generation_is_read(version, members):
    told = [
        {
            "id": f"id-{i}",
            "client": f"client-{i}",
            "host": "/127.0.0.1",
            "assigned": {"orders": [i, i + 2], "bills": [i]},
        }
        for i in range(members)
    ]
    detail = {"protocol": "range", "leader": "id-0", "members": told}
    expected = event("g", "generation", epoch=7, detail=detail)
    assert row(key(2, "g"), generation(version, members)) == expected


def test_an_emptied_group_has_no_protocol_and_no_leader():
    nothing = CLASSIC.string(None) + CLASSIC.string(None)
    value = int16(3) + CLASSIC.string("consumer") + int32(8) + nothing + int64(AT) + CLASSIC.array()
    detail = {"protocol": None, "leader": None, "members": []}
    assert row(key(2, "g"), value) == event("g", "generation", epoch=8, detail=detail)


def test_assignments_that_are_not_those_of_consumers_are_left_alone():
    found = row(key(2, "g"), generation(3, kind="connect"))
    assert [m["assigned"] for m in found["detail"]["members"]] == [{}, {}]


# --- the server-side protocol and share groups ----------------------------------------------------


@pytest.mark.parametrize("kind", SERVER_SIDE)
def test_every_record_of_the_server_side_protocols_is_read(kind):
    key, value, expected = SERVER_SIDE[kind]
    assert row(key, value) == expected


@pytest.mark.parametrize("kind", SERVER_SIDE)
def test_every_tombstone_is_a_row_without_detail(kind):
    key, _, expected = SERVER_SIDE[kind]
    assert row(key, None) == expected | {"epoch": None, "detail": None}


def test_the_tombstone_of_a_classic_group_is_a_row_without_detail():
    assert row(key(2, "g"), None) == event("g", "generation")


def test_fields_that_a_later_kafka_adds_as_tags_are_stepped_over():
    later = FLEXIBLE.tags((0, int64(1)), (7, b"x" * 200), (300, b""))
    assert row(key(3, "g"), int16(0) + int32(12) + later) == SERVER_SIDE["epoch"][2]
    assert row(COMMIT_KEY, commit(4)[:-1] + later) == COMMITTED | {"epoch": 5}


# --- what is not known ----------------------------------------------------------------------------

VALUES = {
    **{kind: (key, value) for kind, (key, value, _) in SERVER_SIDE.items()},
    **{f"commit {v}": (COMMIT_KEY, commit(v, "meta")) for v in range(5)},
    "commit with a topic id": (COMMIT_KEY, commit(4, "meta", TOPIC)),
    "commit with long metadata": (COMMIT_KEY, commit(4, "x" * 130)),
    **{f"generation {v}": (key(2, "g"), generation(v)) for v in range(5)},
}


def is_unknown(found: dict[str, Any], group: str | None, key: bytes, value: bytes | None) -> bool:
    """Whether a row says that a record was not understood, which one, and why."""
    detail = found["detail"] or {}
    told = detail.get("key") == key.hex() and detail.get("value") == (value or b"").hex()
    return told and bool(detail["why"]) and found == event(group, "unknown", detail=detail)


@pytest.mark.parametrize("kind", VALUES)
def test_a_version_from_the_future_is_a_row_that_says_so(kind):
    key, value = VALUES[kind]
    for version in (5, 99, -1):
        strange = int16(version) + value[2:]
        found = row(key, strange)
        assert f"version {version}" in found["detail"]["why"]
        assert is_unknown(found, "g", key, strange)


@pytest.mark.parametrize("kind", [9, 17, 18, 23, 99, -1])
def test_a_type_from_the_future_is_a_row_that_says_so(kind):
    strange = key(kind, "g", "m")
    found = row(strange, int16(0))
    assert f"type {kind}" in found["detail"]["why"]
    assert is_unknown(found, None, strange, int16(0))


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_cut_short_anywhere_is_a_row_that_says_so(kind):
    key, value = VALUES[kind]
    whole = row(key, value)
    for length in range(len(value)):
        found = row(key, value[:length])
        if kind in UNREAD and length >= 2:
            assert found == whole
        else:
            assert is_unknown(found, "g", key, value[:length]), length


@pytest.mark.parametrize("kind", VALUES)
def test_a_key_cut_short_anywhere_is_a_row_that_says_so(kind):
    key, value = VALUES[kind]
    for length in range(len(key)):
        for told in (value, None):
            assert is_unknown(row(key[:length], told), None, key[:length], told), length


def test_a_record_without_a_key_is_a_row_that_says_so():
    for nothing in (None, b""):
        assert is_unknown(row(nothing, commit(4)), None, b"", commit(4))


def test_a_key_without_a_name_is_a_row_that_says_so():
    nameless = int16(1) + int16(-1) + CLASSIC.string("orders") + int32(0)
    assert is_unknown(row(nameless, commit(4)), None, nameless, commit(4))


def test_any_bytes_are_a_row():
    noise = [struct.pack(">q", n * 0x9E3779B97F4A7C15 % (1 << 62)) * 4 for n in range(300)]
    records = [
        (key, int16(version) + data)
        for data in noise
        for key, _ in VALUES.values()
        for version in (0, 4)
    ]
    assert len(rows(*records)) == len(records)


def test_a_length_that_never_ends_is_a_row_that_says_so():
    for endless in (b"\xff" * 40, b"\xff\xff\xff\xff\x7f" * 8):
        assert row(key(7, "g", "m"), int16(0) + endless)["kind"] == "unknown"


# --- batches --------------------------------------------------------------------------------------


def test_an_empty_batch_stays_empty():
    assert rows() == []
    assert list(decode(iter([]))) == []


def test_each_row_keeps_its_time_and_its_place_in_the_log():
    records = [(COMMIT_KEY, commit(4)), (None, None), (key(2, "g"), None), (COMMIT_KEY, b"")]
    found = rows(*records)
    assert [r["kind"] for r in found] == ["commit", "unknown", "generation", "unknown"]
    assert [r["log_offset"] for r in found] == [100, 101, 102, 103]
    assert {(r["log_partition"], r["at"]) for r in found} == {(3, AT)}


def test_a_part_of_a_batch_is_read_like_a_batch():
    values = [commit(v, "x" * n) for v in range(5) for n in (0, 7, 126, 127)]
    records = [(COMMIT_KEY, v) for v in [*values, None, b"", b"\0\4", commit(4, "", TOPIC), None]]
    raw = [dict(zip(RAW.names, (*r, datetime.fromtimestamp(0, UTC), 0, 0))) for r in records]
    batch = pa.RecordBatch.from_pylist(raw, schema=RAW)
    (whole,) = decode(iter([batch]))
    for begin in range(len(records) + 1):
        for length in (0, 1, 3, len(records)):
            (part,) = decode(iter([batch.slice(begin, length)]))
            assert part.equals(whole.slice(begin, length))


def test_keys_and_groups_are_not_confused_between_records():
    records = [(key(1, f"g{i % 3}", "orders", i % 5), commit(4)) for i in range(60)] * 2
    found = [(r["group"], r["partition"]) for r in rows(*records)]
    assert found == [(f"g{i % 3}", i % 5) for i in range(60)] * 2


def test_events_from_elsewhere_leave_open_what_they_do_not_say():
    batch = batch_of([{"group": "g", "kind": "killed", "member": "m", "at": AT}])
    assert batch is not None and batch.schema == EVENTS
    expected = event("g", "killed", member="m") | {"at": AT}
    assert batch.to_pylist() == [expected | {"log_partition": None, "log_offset": None}]
    assert batch_of([]) is None
