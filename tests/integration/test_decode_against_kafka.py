"""The decoder against Kafka's own: kafka-dump-log reads the same bytes, every row is compared."""

from __future__ import annotations

import base64
import json
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, Producer, ShareConsumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

import labkit
from labkit.watch.decode import decode
from labkit.watch.tail import RAW

OFFSETS = "__consumer_offsets"
QUIET = {"log_level": 0, "error_cb": lambda error: None}


@pytest.fixture(scope="module")
def cluster() -> Iterator[labkit.EmbeddedCluster]:
    """A broker of its own, so that all that stands in its offsets topic is known."""
    with labkit.start(brokers=1, name="decoded", fresh=True) as cluster:
        write_everything(cluster)
        yield cluster


# --- a log with everything in it ------------------------------------------------------------------


def consumer(cluster: labkit.Cluster, group: str, client: str, **more: Any) -> Consumer:
    settings = {"group.id": group, "client.id": client, "auto.offset.reset": "earliest", **QUIET}
    settings |= {"enable.auto.commit": False, "bootstrap.servers": cluster.bootstrap}
    if "group_protocol" not in more:
        settings |= {"heartbeat.interval.ms": 200, "session.timeout.ms": 6000}
    return Consumer(settings | {key.replace("_", "."): value for key, value in more.items()})


def poll_until(condition: Callable[[], bool], consumers: list[Any], what: str) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"after 20 s: {what}"
        for each in consumers:
            each.poll(0.05)


def owned(*consumers: Consumer) -> list[int]:
    """Return how many partitions each has."""
    return [len(each.assignment()) for each in consumers]


def two_join_and_one_leaves(cluster: labkit.Cluster, group: str, **more: Any) -> None:
    """Write a group's joins, a rebalance, commits with metadata, and a member's leaving."""
    first = consumer(cluster, group, f"{group}-1", **more)
    second = consumer(cluster, group, f"{group}-2", **more)
    first.subscribe(["orders", "bills"])
    poll_until(lambda: owned(first) == [6], [first], f"{group}: the first owns all")
    second.subscribe(["orders"])
    both = [first, second]
    poll_until(lambda: sum(owned(*both)) == 6 and 0 not in owned(*both), both, f"{group}: both own")
    first.commit(offsets=[TopicPartition("bills", 1, 3, "why ü")], asynchronous=False)
    second.commit(offsets=[TopicPartition("orders", 3, 4)], asynchronous=False)
    second.close()
    poll_until(lambda: owned(first) == [6], [first], f"{group}: the first owns all again")
    first.close()


def transactions(cluster: labkit.Cluster) -> None:
    reader = consumer(cluster, "exactly", "exactly-1")
    producer = Producer(
        {"bootstrap.servers": cluster.bootstrap, "transactional.id": "pay", **QUIET}
    )
    producer.init_transactions(20)
    for end, offset in ((producer.commit_transaction, 1), (producer.abort_transaction, 2)):
        producer.begin_transaction()
        producer.produce("bills", b"paid")
        producer.send_offsets_to_transaction(
            [TopicPartition("orders", 0, offset)], reader.consumer_group_metadata(), 20
        )
        end(20)
    reader.close()


def share(cluster: labkit.Cluster) -> None:
    settings = {"bootstrap.servers": cluster.bootstrap, "group.id": "shared", **QUIET}
    reader = ShareConsumer(settings | {"client.id": "shared-1"})
    reader.subscribe(["orders"])
    got: list[Any] = []
    deadline = time.monotonic() + 20
    while not got:
        assert time.monotonic() < deadline, "after 20 s: the share group has read nothing"
        producer = Producer({"bootstrap.servers": cluster.bootstrap, **QUIET})
        producer.produce("orders", b"shared")
        producer.flush(5)
        got += reader.poll(0.5) or []
    reader.close()


def write_everything(cluster: labkit.Cluster) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap, **QUIET})
    for made in admin.create_topics([NewTopic("orders", 4, 1), NewTopic("bills", 2, 1)]).values():
        made.result()
    producer = Producer({"bootstrap.servers": cluster.bootstrap, **QUIET})
    for i in range(40):
        producer.produce("orders", b"x", partition=i % 4)
    producer.flush(20)
    two_join_and_one_leaves(cluster, "range", partition_assignment_strategy="range")
    two_join_and_one_leaves(
        cluster, "cooperative", partition_assignment_strategy="cooperative-sticky"
    )
    two_join_and_one_leaves(cluster, "server", group_protocol="consumer")
    static = consumer(cluster, "static", "static-1", group_instance_id="till 1")
    static.subscribe(["orders"])
    poll_until(lambda: owned(static) == [4], [static], "the static member owns all")
    pattern = consumer(cluster, "pattern", "pattern-1", group_protocol="consumer")
    pattern.subscribe(["^ord.*"])
    poll_until(lambda: owned(pattern) == [4], [pattern], "the member with a pattern owns all")
    transactions(cluster)
    share(cluster)
    cluster.run("kafka-consumer-groups --delete-offsets --group cooperative --topic orders:3")
    for group in ("range", "server"):
        admin.delete_consumer_groups([group])[group].result()
    pattern.close()
    static.close()


# --- reading it twice -----------------------------------------------------------------------------


def ours(cluster: labkit.Cluster) -> dict[tuple[int, int], dict[str, Any]]:
    """Return our rows by partition and offset, from all records, also the aborted ones."""
    reader = consumer(cluster, "reader", "reader", isolation_level="read_uncommitted")
    partitions = reader.list_topics(OFFSETS).topics[OFFSETS].partitions
    ends = {p: reader.get_watermark_offsets(TopicPartition(OFFSETS, p))[1] for p in partitions}
    reader.assign([TopicPartition(OFFSETS, p, 0) for p, end in ends.items() if end])
    records: list[Any] = []

    def at_the_end() -> bool:
        positions = reader.position([TopicPartition(OFFSETS, p) for p, end in ends.items() if end])
        return all(p.offset >= ends[p.partition] for p in positions)

    deadline = time.monotonic() + 20
    while not at_the_end():
        assert time.monotonic() < deadline, "after 20 s: the offsets topic was not read"
        records += [r for r in reader.consume(1000, 0.2) if r.error() is None]
    reader.close()
    raw = [
        (r.key(), r.value(), r.timestamp()[1] * 1000, r.partition(), r.offset()) for r in records
    ]
    batch = pa.RecordBatch.from_pylist([dict(zip(RAW.names, row)) for row in raw], schema=RAW)
    (events,) = decode(iter([batch]))
    return {(row["log_partition"], row["log_offset"]): row for row in events.to_pylist()}


def theirs(cluster: labkit.EmbeddedCluster) -> dict[tuple[int, int], tuple[int, Any, Any]]:
    """Return time, key and value of each record as Kafka prints them, by partition and offset."""
    files = sorted(cluster._folder.glob(f"node-1/{OFFSETS}-*/*.log"))
    dump = cluster.run(f"kafka-dump-log --offsets-decoder --files {','.join(map(str, files))}")
    found: dict[tuple[int, int], tuple[int, Any, Any]] = {}
    partition, records = -1, 0
    for line in dump.splitlines():
        if file := re.match(rf"Dumping .*/{OFFSETS}-(\d+)/", line):
            partition = int(file[1])
        elif batch := re.match(r"baseOffset: .* count: (\d+) .* isControl: (true|false)", line):
            records += int(batch[1]) if batch[2] == "false" else 0
        elif record := re.match(
            r"\| offset: (\d+) CreateTime: (\d+) .*?key: (\{.*\}) payload: (\{.*\}|<DELETE>)$", line
        ):
            value = None if record[4] == "<DELETE>" else json.loads(record[4])
            found[partition, int(record[1])] = int(record[2]), json.loads(record[3]), value
    assert len(found) == records  # no line of the dump was passed over
    return found


def expected(key: dict[str, Any], value: dict[str, Any] | None) -> dict[str, Any]:
    """Return the row that Kafka's reading of a record makes."""
    names, told = key["data"], (value or {}).get("data", {})
    row: dict[str, Any] = {"group": names.get("group", names.get("groupId"))}
    kind, gone = int(key["type"]), value is None
    row["kind"] = {
        **{1: "commit", 2: "generation", 3: "epoch", 4: "partition metadata", 5: "member"},
        **{6: "target epoch", 7: "target"},
        **{8: "current", 10: "share member", 11: "share epoch", 12: "share target epoch"},
        **{13: "share target", 14: "share current", 15: "share state", 16: "regular expression"},
    }[kind]
    row["member"] = names.get("memberId", names.get("regularExpression"))
    row["topic"], row["partition"] = names.get("topic"), names.get("partition")
    row["offset"], epoch = told.get("offset"), ["generation", "epoch", "assignmentEpoch"]
    row["epoch"] = next(
        (told[e] for e in [*epoch, "memberEpoch", "leaderEpoch"] if e in told), None
    )
    row["detail"] = None if gone or kind == 1 else detail(kind, told)
    return row


def detail(kind: int, told: dict[str, Any]) -> dict[str, Any]:
    if kind == 2:
        members = [
            {
                "id": member["memberId"],
                "client": member["clientId"],
                "host": member["clientHost"],
                "assigned": {
                    place["topic"]: place["partitions"]
                    for place in member["assignment"]["assignedPartitions"]
                },
            }
            for member in told["members"]
        ]
        return {"protocol": told["protocol"], "leader": told["leader"], "members": members}
    if kind in (5, 10):
        return {"client": told["clientId"], "host": told["clientHost"]}
    if kind in (7, 13):
        return {"assigned": places(told["topicPartitions"])}
    if kind in (8, 14):
        return {
            "state": told["state"],
            "assigned": places(told["assignedPartitions"]),
            "revoking": places(told.get("partitionsPendingRevocation", [])),
        }
    return {}


def places(listed: list[dict[str, Any]]) -> dict[str, list[int]]:
    def plain(id: str) -> str:
        return str(uuid.UUID(bytes=base64.urlsafe_b64decode(id + "==")))

    return {plain(place["topicId"]): place["partitions"] for place in listed}


# --- what is promised -----------------------------------------------------------------------------


def test_every_record_is_read_as_kafka_reads_it(cluster):
    mine, kafkas = ours(cluster), theirs(cluster)
    assert len(mine) > 60 and mine.keys() == kafkas.keys()
    for place, (at, key, value) in kafkas.items():
        row = mine[place] | {}
        row["detail"] = row["detail"] and json.loads(row["detail"])
        where = {"at": at, "log_partition": place[0], "log_offset": place[1]}
        assert row == expected(key, value) | where, (key, value)


def test_the_log_had_everything_that_a_broker_writes(cluster):
    kafkas = theirs(cluster)
    kinds = Counter((int(key["type"]), value is None) for _, key, value in kafkas.values())
    alive = {1, 2, 3, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16}
    assert {kind for kind, gone in kinds if not gone} == alive
    assert {kind for kind, gone in kinds if gone} >= {1, 2, 3, 5, 6, 7, 8, 10, 13, 14}
    versions = {value["version"] for _, key, value in kafkas.values() if value}
    assert {"4", "3", "0"} <= versions
    revoking = [value for _, key, value in kafkas.values() if key["type"] == "8" and value]
    assert any(value["data"]["partitionsPendingRevocation"] for value in revoking)
    offsets = {
        value["data"]["offset"]
        for _, key, value in kafkas.values()
        if key["type"] == "1" and value and key["data"]["group"] == "exactly"
    }
    assert offsets == {1, 2}  # the aborted one stands in the log, too
