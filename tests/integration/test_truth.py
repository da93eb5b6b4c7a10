"""The tables are true: random schedules from a seed, compared with what Kafka's own tool prints."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import NewPartitions, NewTopic

import labkit
from labkit.groups import Group
from labkit.watch import Watch, log, tables
from labkit.watch.decode import decode
from labkit.watch.fold import Tables
from labkit.watch.tail import RAW

PROTOCOLS = {
    "range": {"assignor": "range"},
    "cooperative": {"assignor": "cooperative-sticky"},
    "server-side": {"protocol": "consumer"},
}
QUIET_WITHIN = 120.0

KAFKA_PYTHON = """
import sys
from kafka import KafkaConsumer
from kafka.coordinator.assignors.range import RangePartitionAssignor
bootstrap, group, topic = sys.argv[1:]
consumer = KafkaConsumer(
    bootstrap_servers=bootstrap.split(","), group_id=group, client_id="python-1",
    partition_assignment_strategy=[RangePartitionAssignor], auto_offset_reset="earliest",
    session_timeout_ms=3000, heartbeat_interval_ms=300, enable_auto_commit=False,
    metadata_max_age_ms=1000,
)
consumer.partitions_for_topic(topic)
consumer.subscribe([topic])
while True:
    coordinator = consumer._coordinator
    task = getattr(coordinator, "_join_task", None)  # see the notes on this client's wedged joins
    if task is not None and getattr(task, "is_done", False) and not coordinator.need_rejoin():
        coordinator.request_rejoin()
    if consumer.poll(200):
        try:
            consumer.commit()
        except Exception as error:
            print(error, flush=True)
"""


# --- one owner at a time, on the raw records ------------------------------------------------------


def raw_events(cluster: labkit.Cluster) -> list[dict[str, Any]]:
    """Read the whole offsets topic with a plain client, not with Spark."""
    reader = Consumer(
        {"bootstrap.servers": cluster.bootstrap, "group.id": "x", "enable.auto.commit": False}
    )
    rows: list[tuple[Any, ...]] = []
    for partition in cluster.topics(internal=True).query(f"topic == '{log.OFFSETS}'").itertuples():
        reader.assign([TopicPartition(log.OFFSETS, partition.partition, 0)])
        position = 0
        while position < partition.end:
            (record,) = reader.consume(1, timeout=20)
            assert not record.error(), record.error()
            at = record.timestamp()[1] * 1000
            rows.append((record.key(), record.value(), at, record.partition(), record.offset()))
            position = record.offset() + 1
    reader.close()
    columns = [pa.array(column, RAW.field(i).type) for i, column in enumerate(zip(*rows))]
    batch = pa.RecordBatch.from_arrays(columns, schema=RAW)
    return [event for events in decode(iter([batch])) for event in events.to_pylist()]


def two_owners(events: list[dict[str, Any]]) -> list[str]:
    """Say where the records give a partition to two members at once."""
    found: list[str] = []
    has: dict[tuple[str, str], set[tuple[str, int]]] = {}
    for event in events:
        detail = json.loads(event["detail"]) if event["detail"] else None
        if event["kind"] == "generation":
            given = [
                (topic, partition)
                for member in (detail or {"members": []})["members"]
                for topic, partitions in member["assigned"].items()
                for partition in partitions
            ]
            found += [f"{event['group']} {place}" for place in given if given.count(place) > 1]
        elif event["kind"] == "current":
            mine = {
                (topic, partition)
                for part in ("assigned", "revoking")
                for topic, partitions in (detail or {}).get(part, {}).items()
                for partition in partitions
            }
            for (group, member), theirs in has.items():
                if group == event["group"] and member != event["member"]:
                    found += [f"{group} {place}" for place in mine & theirs]
            has[event["group"], event["member"]] = mine
    return found


def mutated(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give one member, in one record, a partition that another one has."""
    changed = copy.deepcopy(events)
    for event in reversed(changed):
        detail = json.loads(event["detail"]) if event["detail"] else None
        members = (detail or {}).get("members", [])
        if event["kind"] == "generation" and len(members) > 1:
            full = max(members, key=lambda member: sum(map(len, member["assigned"].values())))
            other = next(member for member in members if member is not full)
            other["assigned"] = full["assigned"]
        elif event["kind"] == "current" and detail and detail["assigned"]:
            ((topic, partitions), *_) = detail["assigned"].items()
            detail["assigned"] = {topic: list(range(max(partitions) + 1))}
            if detail["assigned"][topic] == partitions:
                continue
        else:
            continue
        event["detail"] = json.dumps(detail)
        return changed
    raise AssertionError("there is no record to change")


def overlaps(table: Any) -> list[str]:
    """Say where a table of ownership gives a partition to two members at once."""
    found = []
    for place, rows in table.sort_values("since").groupby(["group", "topic", "partition"]):
        ends = rows.until.tolist()
        for end, begin in zip(ends, rows.since.tolist()[1:]):
            if not end <= begin:
                found.append(f"{place}: until {end}, then from {begin}")
    return found


# --- what Kafka's own tool says -------------------------------------------------------------------


def printed(cluster: labkit.Cluster, group: str) -> tuple[dict[Any, Any], dict[Any, Any], set[Any]]:
    """Return offsets and owners by partition, and the members, as kafka-consumer-groups prints."""
    offsets, owners, members = {}, {}, set()
    for line in cluster.run(f"kafka-consumer-groups --describe --group {group}").splitlines():
        words = line.split()
        if len(words) == 9 and words[0] == group:
            numbers = [None if word == "-" else int(word) for word in words[3:6]]
            place = (words[1], int(words[2]))
            offsets[place] = tuple(numbers)
            owners[place] = None if words[6] == "-" else (words[6], words[8])
    listed = cluster.run(f"kafka-consumer-groups --describe --group {group} --members")
    for line in listed.splitlines():
        words = line.split()
        if len(words) >= 4 and words[0] == group:
            members.add((words[1], words[3], words[2]))
    return offsets, owners, members


def told(watch: Watch, group: str) -> tuple[dict[Any, Any], dict[Any, Any], set[Any]]:
    """Return the same from the watch's tables."""
    offsets = {
        (row.topic, row.partition): tuple(
            None if str(value) == "<NA>" else int(value)
            for value in (row.committed, row.end, row.lag)
        )
        for row in watch.offsets(group).itertuples()
    }
    people = {row.member: (row.id, row.client) for row in watch.members(group).itertuples()}
    now = watch.ownership(group)
    now = now[now.until.isna() & (now.state != "unowned")]
    owners = {(row.topic, row.partition): people[row.member] for row in now.itertuples()}
    members = {(row.id, row.client, row.host) for row in watch.members(group).itertuples()}
    return offsets, {place: owners.get(place) for place in offsets}, members


# --- schedules ------------------------------------------------------------------------------------


class Schedule:
    """A group, what is done to it, and what must be so whenever it is quiet."""

    def __init__(self, cluster: Any, watch: Watch, protocol: str, seed: int) -> None:
        self.cluster, self.watch, self.protocol = cluster, watch, protocol
        self.chance = random.Random(seed)
        self.name = f"{protocol}.{seed}.{os.urandom(2).hex()}"
        self.topic, self.partitions = f"topic.{self.name}", 4
        made = cluster._admin().create_topics([NewTopic(self.topic, 4, 3)])
        made[self.topic].result()
        cluster.wait_for("leaders", self.topic)
        self.produce()
        options = PROTOCOLS[protocol]
        self.group: Group = cluster.group(
            self.name, topics=self.topic, members=2, work_ms=0, **options
        )
        self.python: subprocess.Popen[bytes] | None = None
        self.dead_broker: int | None = None
        self.done: list[str] = []

    def produce(self) -> None:
        producer = Producer({"bootstrap.servers": self.cluster.bootstrap, "acks": "all"})
        for i in range(40):
            producer.produce(self.topic, str(i), partition=i % self.partitions)
        assert producer.flush(30) == 0

    def members(self, state: str) -> list[str]:
        table = self.group.members
        return sorted(table[table.state == state].member)

    def step(self) -> None:
        running, frozen = self.members("running"), self.members("frozen")
        actions = [self.add] if len(running) < 4 else []
        actions += [self.stop, self.kill, self.freeze] if len(running) > 1 else []
        actions += [self.thaw] if frozen else []
        actions += [self.reset] if not frozen else []
        actions += [self.grow] if self.partitions < 8 else []
        actions += [self.kill_broker] if self.dead_broker is None else [self.restart_broker]
        if self.protocol == "range":
            actions += [self.start_python if self.python is None else self.kill_python]
        action = self.chance.choice(actions)
        self.done.append(action.__name__)
        action(
            *(
                [self.chance.choice(running)]
                if action in (self.stop, self.kill, self.freeze)
                else []
            )
        )
        if action not in (self.reset,):
            self.produce()

    def add(self) -> None:
        self.group.add()

    def stop(self, member: str) -> None:
        self.group.stop(member)

    def kill(self, member: str) -> None:
        self.group.kill(member)

    def freeze(self, member: str) -> None:
        self.group.freeze(member)  # and it stays so until the coordinator has expelled it

    def thaw(self) -> None:
        self.group.thaw(self.members("frozen")[0])

    def reset(self) -> None:
        if self.python is not None:  # it would not be told
            self.kill_python()
            self.wait_until_quiet()
        self.group.reset(by=-5)

    def grow(self) -> None:
        self.partitions += 2
        more = NewPartitions(self.topic, self.partitions)
        self.cluster._admin().create_partitions([more])[self.topic].result()
        self.cluster.wait_for("leaders", self.topic)

    def kill_broker(self) -> None:
        self.dead_broker = self.chance.choice(self.cluster.brokers)
        self.cluster.kill(self.dead_broker)
        self.cluster.wait_for("leaders")

    def restart_broker(self) -> None:
        self.cluster.restart(self.dead_broker)
        self.cluster.wait_for("in-sync")
        self.dead_broker = None

    def start_python(self) -> None:
        argv = [sys.executable, "-c", KAFKA_PYTHON, self.cluster.bootstrap, self.name, self.topic]
        self.python = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def kill_python(self) -> None:
        self.python.kill()
        self.python.wait()
        self.python = None

    def wait_until_quiet(self) -> tuple[Any, Any, Any]:
        """Wait until the tool, asked twice, says the same: all there, all owned, all read."""
        expected = {*self.members("running"), *(["python-1"] if self.python else [])}
        deadline, before = time.monotonic() + QUIET_WITHIN, None
        while True:
            try:
                now = printed(self.cluster, self.name)
            except labkit.LabError as error:  # as while the coordinator moves
                now = (error, {}, set())
            offsets, owners, members = now
            quiet = (
                now == before
                and {client for _, client, _ in members} == expected
                and len(members) == len(expected)
                and len(offsets) == self.partitions
                and all(owners.values())
                and all(lag == 0 for *_, lag in offsets.values())
            )
            if quiet:
                return now
            assert time.monotonic() < deadline, f"{self.done}: not quiet, {expected} but {now}"
            if now == before and all(owners.values()):
                self.produce()  # a commit that a rebalance refused is made up for by the next one
            before = now

    def check(self) -> None:
        """Compare at a quiet moment: the tool before and after, our tables in between."""
        deadline = time.monotonic() + QUIET_WITHIN
        while True:
            tool = self.wait_until_quiet()
            self.watch.wait_until_current(QUIET_WITHIN)
            ours = told(self.watch, self.name)
            if printed(self.cluster, self.name) == tool:
                assert ours == tool, f"after {self.done}"
                break
            assert time.monotonic() < deadline, f"never quiet after {self.done}"
        assert overlaps(self.watch.ownership(self.name)) == [], f"after {self.done}"

    def close(self) -> None:
        self.group.close()
        if self.python is not None:
            self.kill_python()
        if self.dead_broker is not None:
            self.restart_broker()
        deadline = time.monotonic() + QUIET_WITHIN  # a killed member is missed after its session
        while printed(self.cluster, self.name)[2]:
            assert time.monotonic() < deadline, "the group does not become empty"


def run(cluster: Any, watch: Watch, protocol: str, seed: int, steps: int, folder: Any) -> None:
    schedule = Schedule(cluster, watch, protocol, seed)
    try:
        schedule.check()
        for _ in range(steps):
            schedule.step()
            schedule.check()
    finally:
        schedule.close()
    watch.wait_until_current(QUIET_WITHIN)

    saved = labkit.open(watch.save(folder / "run.trace"))
    for name in ("offsets", "ownership", "members"):
        live, again = getattr(watch, name)(), getattr(saved, name)()
        assert again.equals(live), f"{name} of the trace differs after {schedule.done}"

    records = cluster.spark().read.format("kafka")
    options = log.options(cluster.bootstrap, {}, watch._sampler.partitions)
    batch = tables(records.options(**options).load(), saved._tables.ids)
    # The batch knows the log only: compare it with the fold of what the stream read from the log.
    of_log = Tables()
    events = saved._events
    of_log.take(events.filter(pc.is_valid(events["log_offset"])).to_batches())
    of_log.ids = batch.ids
    for name in ("offsets", "ownership", "members"):
        one, other = (getattr(t, name)(schedule.name) for t in (batch, of_log))
        assert one.equals(other), f"{name} of the batch differs after {schedule.done}"

    events = raw_events(cluster)
    assert two_owners(events) == []
    ours = [event for event in events if event["group"] == schedule.name]
    assert two_owners(mutated(ours)), "a changed log must be noticed"


@pytest.fixture(scope="module")
def lab() -> Iterator[Any]:
    with labkit.start(brokers=3, controllers=1, name="truth", fresh=True) as cluster:
        yield cluster


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_at_every_quiet_moment_the_tables_say_what_kafka_says(lab, protocol, tmp_path):
    run(lab, lab.watch(), protocol, seed=1, steps=5, folder=tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100))
def test_a_hundred_schedules(lab, seed, tmp_path):
    protocol = sorted(PROTOCOLS)[seed % 3]
    run(lab, lab.watch(), protocol, seed=seed, steps=6, folder=tmp_path)
