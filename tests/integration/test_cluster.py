"""A real cluster is started, looked at, broken and healed."""

from __future__ import annotations

import pandas as pd
import pytest
from kafka import KafkaAdminClient, KafkaConsumer, KafkaProducer
from kafka.admin import NewTopic

import labkit
from labkit.cluster.tools import TOOLS


def create(cluster: labkit.Cluster, topic: str, partitions: int = 3, copies: int = 3) -> None:
    admin = KafkaAdminClient(bootstrap_servers=cluster.bootstrap)
    admin.create_topics([NewTopic(topic, partitions, copies)])
    admin.close()
    cluster.wait_for("leaders", topic=topic)


def send(cluster: labkit.Cluster, topic: str, values: range, **options: object) -> list[int]:
    """Send numbers and return those that were acknowledged."""
    producer = KafkaProducer(bootstrap_servers=cluster.bootstrap, **options)
    futures = {value: producer.send(topic, str(value).encode()) for value in values}
    acked = []
    for value, future in futures.items():
        future.get(30)
        acked.append(value)
    producer.close()
    return acked


def read(cluster: labkit.Cluster, topic: str, idle_ms: int = 3000) -> list[int]:
    consumer = KafkaConsumer(
        topic,
        bootstrap_servers=cluster.bootstrap,
        auto_offset_reset="earliest",
        consumer_timeout_ms=idle_ms,
    )
    values = [int(record.value) for record in consumer]
    consumer.close()
    return values


def test_a_record_sent_is_a_record_read(cluster, topic):
    create(cluster, topic)
    send(cluster, topic, range(10), acks="all")
    assert sorted(read(cluster, topic)) == list(range(10))


def test_topics_tells_leaders_replicas_and_offsets(cluster, topic):
    create(cluster, topic, partitions=2)
    send(cluster, topic, range(7), acks="all")
    table = cluster.topics()
    table = table[table.topic == topic]
    columns = ["topic", "partition", "leader", "replicas", "isr", "start", "end"]
    assert list(table.columns) == columns
    assert list(table.partition) == [0, 1]
    assert table.end.sum() == 7 and table.start.sum() == 0
    assert all(sorted(replicas) == [1, 2, 3] for replicas in table.replicas)
    assert all(leader == replicas[0] for leader, replicas in zip(table.leader, table.replicas))
    assert not cluster.topics().topic.str.startswith("__").any()


def test_segments_shows_the_records_on_disk(cluster, topic):
    create(cluster, topic, partitions=2)
    producer = KafkaProducer(bootstrap_servers=cluster.bootstrap)
    for value in (b"one: 1 key: x", b"two", None):
        producer.send(topic, value, key=b"berlin", headers=[("h", b"1")], partition=1).get(10)
    producer.close()
    records = cluster.segments(topic)
    assert list(records.offset) == [0, 1, 2]
    assert list(records.partition) == [1, 1, 1]
    assert list(records.key) == ["berlin"] * 3
    assert list(records.value)[:2] == ["one: 1 key: x", "two"] and records.value.isna()[2]
    assert records.file.unique().tolist() == ["00000000000000000000.log"]
    assert records.timestamp.notna().all()
    for broker in cluster.brokers:  # every replica has the same records
        copy = cluster.segments(topic, partition=1, broker=broker)
        pd.testing.assert_frame_equal(copy, records)


def test_run_fills_in_the_bootstrap_server_and_uses_no_shell(cluster, topic):
    create(cluster, topic)
    assert topic in cluster.run("kafka-topics --list").splitlines()
    text = cluster.run(f"kafka-topics.sh --describe --topic {topic}")
    assert "PartitionCount: 3" in text and repr(text) == str(text)
    with pytest.raises(labkit.LabError, match="failed"):
        cluster.run("kafka-topics --list; touch /tmp/should-not-exist")


def test_run_takes_input(cluster, topic):
    create(cluster, topic, partitions=1)
    cluster.run(f"kafka-console-producer --topic {topic}", input="1\n2\n")
    out = cluster.run(f"kafka-console-consumer --topic {topic} --from-beginning --max-messages 2")
    assert out.splitlines() == ["1", "2"]


def test_every_tool_is_in_the_jars():
    import zipfile

    from labkit import runtime

    names = {n for jar in runtime.jars() for n in zipfile.ZipFile(jar).namelist()}
    for tool, main in TOOLS.items():
        assert main.replace(".", "/") + ".class" in names, tool


def test_features_of_groups_and_transactions_are_on(cluster):
    features = cluster.run("kafka-features describe")
    for feature, level in (("group", 1), ("share", 1), ("transaction", 2)):
        line = next(x for x in features.splitlines() if f"{feature}.version" in x)
        assert f"FinalizedVersionLevel: {level}" in line


def test_killing_the_leader_loses_no_acked_record(topic):
    with labkit.start(brokers=3, fresh=True) as cluster:
        create(cluster, topic, partitions=1)
        acked = send(cluster, topic, range(500), acks="all")
        leader = int(cluster.topics().leader[0])
        cluster.kill(leader)
        assert cluster.nodes().set_index("node").state[leader] == "dead"
        cluster.wait_for("leaders")
        assert int(cluster.topics().leader[0]) != leader
        acked += send(cluster, topic, range(500, 1000), acks="all")
        assert sorted(read(cluster, topic)) == acked == list(range(1000))
        address = cluster.nodes().set_index("node").address[leader]
        cluster.restart(leader)
        cluster.wait_for("in-sync")
        assert cluster.nodes().set_index("node").address[leader] == address
        copy = cluster.segments(topic, broker=leader)  # same data, and what it missed
        assert len(copy) == 1000


def test_a_frozen_broker_is_there_but_silent_until_thawed(topic):
    with labkit.start(brokers=3, fresh=True) as cluster:
        create(cluster, topic, partitions=3)
        cluster.freeze(3)
        cluster.wait_for("leaders")
        assert 3 not in set(cluster.topics().leader)
        assert "frozen" in repr(cluster)
        cluster.thaw(3)
        cluster.wait_for("brokers")
        cluster.wait_for("in-sync")
        assert cluster.nodes().state.eq("running").all()


def test_stop_hands_leadership_over_and_restart_brings_it_back(topic):
    with labkit.start(brokers=3, fresh=True) as cluster:
        create(cluster, topic, partitions=6)
        cluster.stop(1)
        assert cluster.nodes().state.tolist() == ["dead", "running", "running"]
        assert "Shutdown completed" in cluster.log(1)  # it was not cut off
        cluster.restart(1)
        cluster.wait_for("in-sync")


def test_a_broker_can_be_added():
    with labkit.start(brokers=1, fresh=True) as cluster:
        assert cluster.add_broker() == 2
        assert cluster.brokers == [1, 2]
        create(cluster, "wide", partitions=2, copies=2)
        assert cluster.topics().leader.nunique() == 2
        assert labkit.start() is cluster  # and it belongs to the cluster from then on


@pytest.mark.parametrize(
    "options, roles",
    [
        ({"brokers": 1}, {1: "broker, controller"}),
        ({"brokers": 2}, {1: "broker", 2: "broker", 101: "controller"}),
        ({"brokers": 4}, {i: "broker, controller" if i < 4 else "broker" for i in (1, 2, 3, 4)}),
        ({"brokers": 1, "controllers": 1}, {1: "broker", 101: "controller"}),
    ],
)
def test_who_is_controller(options, roles):
    with labkit.start(**options, fresh=True) as cluster:
        nodes = cluster.nodes()
        assert dict(zip(nodes.node, nodes.roles)) == roles
        assert nodes.active_controller.sum() == 1
        quorum = cluster.run("kafka-metadata-quorum describe --status")
        leader = int(quorum.split("LeaderId:")[1].split()[0])
        assert nodes[nodes.active_controller].node.item() == leader


def test_with_controllers_of_their_own_any_broker_may_die(topic):
    with labkit.start(brokers=2, fresh=True) as cluster:
        create(cluster, topic, partitions=2, copies=2)
        for broker in (1, 2):
            cluster.kill(broker)
            cluster.wait_for("leaders")
            cluster.restart(broker)
            cluster.wait_for("in-sync")


def test_settings_reach_every_broker_and_fixed_ports_are_kept():
    from labkit.cluster.plan import free_ports

    port = free_ports(1)[0]
    with labkit.start(
        brokers=1, port=port, config={"log.retention.ms": 123456}, fresh=True
    ) as cluster:
        assert cluster.bootstrap == f"127.0.0.1:{port}"
        out = cluster.run("kafka-configs --describe --all --entity-type brokers --entity-name 1")
        assert "log.retention.ms=123456" in out


def test_nothing_listens_on_an_outside_address(cluster):
    import psutil

    from labkit.cluster.lease import lab_folder
    from tests.conftest import processes_of

    found = [c for p in processes_of(lab_folder("shared")) for c in p.net_connections("tcp")]
    listening = {c.laddr.ip for c in found if c.status == psutil.CONN_LISTEN}
    assert listening and listening <= {"127.0.0.1", "::ffff:127.0.0.1"}


def test_the_picture_says_what_the_summary_says(cluster):
    bundle = cluster._repr_mimebundle_()
    assert bundle["text/plain"] == repr(cluster)
    assert "3 brokers" in repr(cluster) and "<svg" in bundle["image/svg+xml"]
