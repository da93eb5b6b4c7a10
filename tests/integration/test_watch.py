"""The watch: it writes nothing, carries on through faults, says what is wrong, leaves nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

import labkit
from labkit.cluster.lease import lab_folder
from labkit.watch import log, session, tables
from tests.conftest import processes_of


def wait_for(condition: Callable[[], object], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def make(cluster: labkit.Cluster, topic: str, partitions: int = 2, records: int = 20) -> None:
    made = cluster._admin().create_topics([NewTopic(topic, partitions)])
    made[topic].result()
    cluster.wait_for("leaders", topic)
    producer = Producer({"bootstrap.servers": cluster.bootstrap})
    for i in range(records):
        producer.produce(topic, str(i), partition=i % partitions)
    assert producer.flush(20) == 0


def commit(cluster: labkit.Cluster, group: str, topic: str, offset: int) -> None:
    """Commit as one does without a group's membership."""
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": group})
    place = TopicPartition(topic, 0, offset)
    (done,) = consumer.commit(offsets=[place], asynchronous=False)
    consumer.close()
    assert done.error is None


@pytest.fixture
def lab(request: pytest.FixtureRequest) -> Iterator[labkit.EmbeddedCluster]:
    """A cluster of its own, to be broken."""
    options = getattr(request, "param", {"brokers": 1})
    with labkit.start(name="watched", fresh=True, **options) as cluster:
        yield cluster


def test_looking_writes_nothing_and_has_no_offsets_topic_made(lab):
    watch = lab.watch()
    make(lab, "orders")
    watch.wait_until_current()
    assert watch.offsets().empty and watch.ownership().empty and watch.members().empty
    assert set(lab.topics(internal=True).topic) == {"orders"}
    assert "waiting for the first group" in repr(watch)
    commit(lab, "shipping", "orders", 7)
    watch.wait_until_current()
    assert watch.offsets("shipping").committed.tolist() == [7]

    def written() -> list[int]:
        table = lab.topics(internal=True)
        return table[table.topic.str.startswith("__")].end.tolist()

    before = written()
    lab.spark().read.format("kafka").options(
        **log.options(lab.bootstrap, {}, watch._sampler.partitions)
    ).load().count()
    watch.wait_until_current()
    assert written() == before
    listed = lab._admin().list_consumer_groups().result().valid
    assert {group.group_id for group in listed} == {"shipping"}


def test_a_watch_is_the_same_until_it_is_closed_and_close_is_quick(lab):
    watch = lab.watch()
    assert lab.watch() is watch
    watch.close()
    watch.close()
    assert lab.watch() is not watch


@pytest.mark.parametrize("lab", [{"brokers": 3}], indirect=True)
def test_it_carries_on_when_brokers_stop_and_when_all_come_back(lab):
    make(lab, "orders")
    commit(lab, "shipping", "orders", 1)
    watch = lab.watch()
    watch.wait_until_current()
    for broker, offset in ((1, 2), (2, 3)):
        lab.stop(broker)
        lab.wait_for("leaders", log.OFFSETS)
        commit(lab, "shipping", "orders", offset)
        wait_for(lambda wanted=offset: watch.offsets("shipping").committed.tolist() == [wanted])
        lab.restart(broker)
        lab.wait_for("in-sync", log.OFFSETS)
    for broker in lab.brokers:
        lab.kill(broker)
    wait_for(lambda: "in trouble" in repr(watch))
    assert watch.offsets("shipping").committed.tolist() == [3]  # what was known still is
    labkit.start(name="watched")
    lab.wait_for("leaders", log.OFFSETS)
    commit(lab, "shipping", "orders", 4)
    wait_for(lambda: watch.offsets("shipping").committed.tolist() == [4])
    wait_for(lambda: "live" in repr(watch))


@pytest.mark.parametrize(
    "lab", [{"brokers": 1, "config": {"log.cleaner.backoff.ms": 200}}], indirect=True
)
def test_it_carries_on_over_a_compacted_offsets_topic(lab):
    make(lab, "orders")
    commit(lab, "shipping", "orders", 1)
    early = lab.watch()
    early.wait_until_current()
    lab.run(
        f"kafka-configs --alter --entity-type topics --entity-name {log.OFFSETS} --add-config "
        "segment.ms=500,min.cleanable.dirty.ratio=0.01,delete.retention.ms=100"
    )

    def compacted() -> bool:
        commit(lab, "shipping", "orders", 2)  # a nudge, that rolls the segment
        try:
            kept = len(lab.segments(log.OFFSETS))
        except labkit.LabError:
            return False  # a segment was cleaned away while it was read
        return 0 < kept < lab.topics(internal=True).query(f"topic == '{log.OFFSETS}'").end.sum()

    wait_for(compacted)
    commit(lab, "shipping", "orders", 5)
    early.wait_until_current()
    assert early.offsets("shipping").committed.tolist() == [5]
    early.close()
    late = lab.watch()  # begins to read where most is gone
    late.wait_until_current()
    assert late.offsets("shipping").committed.tolist() == [5]


def test_a_deleted_topic_and_an_unknown_group_are_told(lab, capsys):
    make(lab, "orders")
    make(lab, "payments")
    commit(lab, "shipping", "orders", 3)
    commit(lab, "shipping", "payments", 4)
    watch = lab.watch()
    watch.wait_until_current()
    assert set(watch.offsets().topic) == {"orders", "payments"}
    lab._admin().delete_topics(["orders"])["orders"].result()
    wait_for(lambda: set(watch.offsets().topic) == {"payments"})
    assert "topic 'orders' was deleted" in capsys.readouterr().out
    assert "topic 'orders' was deleted" in repr(watch)
    with pytest.raises(labkit.LabError) as caught:
        watch.offsets("shiping")
    assert "no group 'shiping' has been seen; did you mean 'shipping'?" in caught.value.what


AUTHORIZER = {
    "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "allow.everyone.if.no.acl.found": "true",
}


@pytest.mark.parametrize("lab", [{"brokers": 1, "config": AUTHORIZER}], indirect=True)
def test_an_offsets_topic_that_may_not_be_read_is_said_in_two_lines(lab, capfd):
    make(lab, "orders")
    commit(lab, "shipping", "orders", 3)
    for operation, permission in (
        (AclOperation.ALL, AclPermissionType.ALLOW),
        (AclOperation.READ, AclPermissionType.DENY),
    ):
        rule = AclBinding(
            ResourceType.TOPIC,
            log.OFFSETS,
            ResourcePatternType.LITERAL,
            "User:ANONYMOUS",
            "*",
            operation,
            permission,
        )
        lab._admin().create_acls([rule])[rule].result()
    watch = lab.watch()
    with pytest.raises(labkit.LabError) as caught:
        watch.wait_until_current()
    assert "__consumer_offsets may not be read here" in caught.value.what
    with pytest.raises(labkit.LabError, match="Describe and Read"):
        watch.offsets()
    watch.close()
    said = capfd.readouterr()
    assert "Exception" not in said.out + said.err


def test_the_cluster_closed_or_killed_under_the_watch_is_no_hang_and_no_trace(lab, capfd):
    make(lab, "orders")
    commit(lab, "shipping", "orders", 3)
    watch = lab.watch()
    watch.wait_until_current()
    guard = psutil.Process(lab._lease.ask("status")["pid"])
    guard.kill()
    wait_for(lambda: "in trouble" in repr(watch))
    assert watch.offsets("shipping").committed.tolist() == [3]
    begin = time.monotonic()
    lab.close()
    assert time.monotonic() - begin < 20
    assert "closed" in repr(watch)
    assert watch.offsets("shipping").committed.tolist() == [3]
    with pytest.raises(labkit.LabError, match="this watch is closed"):
        watch.wait_until_current()
    with pytest.raises(labkit.LabError, match="this cluster is closed"):
        lab.watch()
    said = capfd.readouterr()
    assert "note: this watch is closed" in said.out
    assert "Traceback" not in said.out + said.err and "Exception" not in said.out + said.err


def test_closing_the_last_cluster_ends_spark_and_another_begins_anew(lab):
    assert lab.spark().range(3).count() == 3
    jvm = psutil.Process(session._process.pid)
    lab.close()
    assert not jvm.is_running()
    with labkit.start(brokers=1, name="watched", fresh=True) as another:
        assert another.spark().range(4).count() == 4


SECOND = """
import labkit, sys
cluster = labkit.start(name="watched")
watch = cluster.watch()
group = cluster.group("packing", topics="orders", members=1)
group.wait_until_stable()
watch.wait_until_current()
print(watch.members("packing").member.tolist(), watch.offsets("shipping").committed.tolist())
print(labkit.watch.session._process.pid, flush=True)
sys.stdin.read()
"""


def test_two_notebooks_watch_at_once_and_a_killed_one_leaves_nothing(lab):
    make(lab, "orders")
    commit(lab, "shipping", "orders", 3)
    watch = lab.watch()
    other = subprocess.Popen(
        [sys.executable, "-c", SECOND],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    try:
        assert other.stdout.readline() == "['packing-1'] [3]\n"
        jvm = psutil.Process(int(other.stdout.readline()))
        watch.wait_until_current()
        assert watch.members("packing").member.tolist() == ["packing-1"]
        other.send_signal(signal.SIGKILL)
        other.wait()
        wait_for(lambda: not jvm.is_running() or jvm.status() == psutil.STATUS_ZOMBIE)
    finally:
        other.kill()
        other.stdin.close(), other.stdout.close()
    lab.close()
    wait_for(lambda: not processes_of(lab_folder("watched")))


def test_the_trace_and_sparks_batch_say_the_same_without_the_cluster(lab, tmp_path):
    make(lab, "orders")
    watch = lab.watch()
    with lab.group("shipping", topics="orders", members=2) as group:
        group.wait_until_stable()
        group.kill("shipping-1")
        group.wait_until_stable()
        watch.wait_until_current()
        states = watch.ownership("shipping")
        assert "silent" in set(states.state)
        assert set(states[states.until.isna()].member) == {"shipping-2"}
    watch.wait_until_current()
    records = (
        lab.spark()
        .read.format("kafka")
        .options(**log.options(lab.bootstrap, {}, watch._sampler.partitions))
        .load()
    )
    batch = tables(records, watch._tables.ids)
    assert batch.offsets().committed.tolist() == watch.offsets().committed.tolist()
    saved = labkit.open(watch.save(tmp_path / "run.trace"))
    lab.close()
    for name in ("offsets", "ownership", "members"):
        assert getattr(saved, name)().equals(getattr(watch, name)())
    assert "shipping" in repr(saved)
