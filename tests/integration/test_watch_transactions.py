"""Commits inside transactions: an aborted one is never shown, an open one delays no other."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

import labkit
from labkit.watch import log

QUIET = {"log_level": 0, "error_cb": lambda error: None}
ABORTED, COMMITTED = 777, 888


@pytest.fixture(scope="module")
def watch(cluster: labkit.Cluster) -> Iterator[Any]:
    watch = cluster.watch()
    yield watch
    watch.close()


@pytest.fixture
def orders(cluster: labkit.Cluster, topic: str) -> str:
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap, **QUIET})
    admin.create_topics([NewTopic(topic, 2, 1)])[topic].result()
    cluster.wait_for("leaders", topic=topic)
    return topic


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"after {seconds} s: {what}"
        time.sleep(0.05)


def home(group: str, partitions: int) -> int:
    """Return the partition of the offsets topic that a group's records go to, as Kafka does."""
    number = 0
    for letter in group:
        number = (31 * number + ord(letter)) & 0xFFFFFFFF
    return abs(number - (1 << 32) if number >> 31 else number) % partitions


def neighbours(cluster: labkit.Cluster, count: int) -> list[str]:
    """Return names of groups that share a partition of the offsets topic."""
    partitions = len(cluster._metadata().topics[log.OFFSETS].partitions)
    run = os.urandom(3).hex()
    names = [f"{run}-{i}" for i in range(1000)]
    wanted = home(names[0], partitions)
    return [name for name in names if home(name, partitions) == wanted][:count]


def commit(cluster: labkit.Cluster, group: str, topic: str, offset: int) -> None:
    reader = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": group, **QUIET})
    reader.commit(offsets=[TopicPartition(topic, 0, offset)], asynchronous=False)
    reader.close()


def committed(watch: Any, group: str) -> int | None:
    """Return what the watch gives as the offset of partition 0; None if it knows of none."""
    with suppress(labkit.LabError):
        table = watch.offsets(group)
        for row in table[table.partition == 0].itertuples():
            return int(row.committed)
    return None


class Transaction:
    """A transaction with a group's offset in it, open until it is told to end."""

    def __init__(self, cluster: labkit.Cluster, group: str, topic: str, offset: int) -> None:
        settings = {"bootstrap.servers": cluster.bootstrap, **QUIET}
        self.producer = Producer(settings | {"transactional.id": f"of {group}"})
        self.producer.init_transactions(20)
        self.producer.begin_transaction()
        self.producer.produce(topic, b"x")
        reader = Consumer(settings | {"group.id": group})
        place = TopicPartition(topic, 0, offset)
        self.producer.send_offsets_to_transaction([place], reader.consumer_group_metadata(), 20)
        reader.close()


class Looking:
    """Look at a group's offset again and again, and keep every value that was seen."""

    def __init__(self, watch: Any, group: str) -> None:
        self.seen: list[int | None] = []
        self._watch, self._group = watch, group
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def _look(self) -> None:
        while not self._end.wait(0.01):
            self.seen.append(committed(self._watch, self._group))

    def __enter__(self) -> Looking:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._end.set()
        self._thread.join()


def is_open(cluster: labkit.Cluster, watch: Any, group: str) -> bool:
    """Whether a transaction holds up the partition that a group's records go to."""
    partitions = len(cluster._metadata().topics[log.OFFSETS].partitions)
    place, sampler = home(group, partitions), watch._sampler
    return bool(
        sampler._ends([place], committed=True)[place]
        < sampler._ends([place], committed=False)[place]
    )


def the_offsets_topic_exists(cluster: labkit.Cluster, watch: Any, topic: str) -> None:
    first = "first-" + os.urandom(3).hex()
    commit(cluster, first, topic, 1)
    wait_until(lambda: committed(watch, first) == 1, "a first commit was not seen", 40)


def test_an_aborted_commit_is_never_shown(cluster, watch, orders):
    the_offsets_topic_exists(cluster, watch, orders)
    group, other = neighbours(cluster, 2)
    commit(cluster, group, orders, 1)
    wait_until(lambda: committed(watch, group) == 1, "the commit before was not seen")
    with Looking(watch, group) as looking:
        transaction = Transaction(cluster, group, orders, ABORTED)
        commit(cluster, other, orders, 5)
        wait_until(lambda: committed(watch, other) == 5, "a commit waits behind the transaction")
        assert is_open(cluster, watch, group)
        while_open = len(looking.seen)
        transaction.producer.abort_transaction(20)
        wait_until(lambda: not is_open(cluster, watch, group), "the transaction did not end")
        watch.wait_until_current()
        commit(cluster, group, orders, 2)
        wait_until(lambda: committed(watch, group) == 2, "the commit after was not seen")
    assert while_open > 10 and set(looking.seen) == {1, 2}
    assert looking.seen == sorted(looking.seen)


def test_an_open_transaction_delays_no_other_group(cluster, watch, orders, tmp_path):
    the_offsets_topic_exists(cluster, watch, orders)
    group, other, third = neighbours(cluster, 3)
    commit(cluster, group, orders, 1)
    wait_until(lambda: committed(watch, group) == 1, "the commit before was not seen")
    settings = {"bootstrap.servers": cluster.bootstrap, "group.id": third, **QUIET}
    member = Consumer(settings | {"client.id": "late", "heartbeat.interval.ms": 200})
    with Looking(watch, group) as looking:
        transaction = Transaction(cluster, group, orders, COMMITTED)
        opened = time.monotonic()
        for offset in range(10, 15):  # several, each of which must come through
            commit(cluster, other, orders, offset)
            wait_until(
                lambda offset=offset: committed(watch, other) == offset,
                f"commit {offset} waits behind the transaction",
            )
        member.subscribe([orders])
        wait_until(lambda: member.poll(0.05) or len(member.assignment()) == 2, "nobody joined")
        wait_until(lambda: third in watch._tables.groups, "the join waits behind the transaction")
        owners = watch.ownership(third)
        assert list(owners.member) == ["late", "late"] and set(owners.state) == {"owned"}
        assert list(watch.members(third).member) == ["late"]
        assert is_open(cluster, watch, group) and time.monotonic() - opened > 1
        assert set(looking.seen) == {1}
        transaction.producer.commit_transaction(20)
        wait_until(lambda: committed(watch, group) == COMMITTED, "its commit was not seen")
    assert set(looking.seen) <= {1, COMMITTED} and looking.seen == sorted(looking.seen)
    member.close()
    watch.wait_until_current()
    wait_until(lambda: watch.members(third).empty, "the member is still there")
    now = watch.ownership(third)
    assert list(now[now.until.isna()].state) == ["unowned", "unowned"]
    the_trace_says_the_same(watch, tmp_path)
    the_log_in_batch_says_the_same(cluster, watch, [group, other, third])


def the_trace_says_the_same(watch: Any, folder: Any) -> None:
    def told(tables: Any) -> list[str]:
        return [t.to_csv() for t in (tables.offsets(), tables.ownership(), tables.members())]

    def quiet() -> bool:
        """Whether nothing came while the trace was saved; then they must be equal."""
        before = told(watch)
        watch.save(folder / "run.trace")
        return before == told(watch)

    wait_until(quiet, "the watch was never quiet")
    assert told(labkit.watch.open(folder / "run.trace")) == told(watch)


def the_log_in_batch_says_the_same(cluster: labkit.Cluster, watch: Any, groups: list[str]) -> None:
    partitions = range(len(cluster._metadata().topics[log.OFFSETS].partitions))
    options = log.options(cluster.bootstrap, {}, partitions)
    records = cluster.spark().read.format("kafka").options(**options).load()
    tables = labkit.watch.tables(records, watch._tables.ids)
    columns = ["group", "topic", "partition", "committed", "at"]
    for group in groups:
        assert tables.offsets(group)[columns].equals(watch.offsets(group)[columns])
        assert tables.ownership(group).equals(watch.ownership(group))
        assert tables.members(group).equals(watch.members(group))
