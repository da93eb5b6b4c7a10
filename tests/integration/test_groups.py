"""Consumer groups of real processes: each verb does what it says, and every answer is true."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import datetime
from typing import Any

import psutil
import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaException
from kafka import KafkaAdminClient, KafkaConsumer

import labkit
from labkit.cluster.lease import lab_folder
from labkit.groups import Group
from tests.integration.test_cluster import create, send
from tests.integration.test_orphans import GRACE, wait_for, wait_until_gone

PROTOCOLS = [
    ("classic", "range"),
    ("classic", "roundrobin"),
    ("classic", "cooperative-sticky"),
    ("consumer", "uniform"),
]
KINDS = {
    *("assigned", "revoked", "lost", "position", "committed", "reset", "failed", "left", "error"),
    *("started", "killed", "frozen", "thawed", "stopped", "slowed", "predicted", "died"),
}


@pytest.fixture(scope="module")
def orders(cluster: labkit.Cluster) -> str:
    """A topic of four partitions and forty records that tests only read."""
    name = f"orders.{os.urandom(3).hex()}"
    create(cluster, name, partitions=4)
    send(cluster, name, range(40), acks="all")
    return name


@pytest.fixture
def name() -> str:
    return f"g{os.urandom(3).hex()}"


def owned(group: Group) -> dict[str, list[str]]:
    return dict(zip(group.members.member, group.members.partitions))


def states(group: Group) -> list[str]:
    return list(group.members.state)


def reports(group: Group, *kinds: str) -> list[dict[str, Any]]:
    lines = (group._lease.folder / "reports.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [r for r in found if r["group"] == group.name and (not kinds or r["kind"] in kinds)]


def check_owners(group: Group, partitions: int) -> None:
    """Check that each partition has one owner that runs, and that Kafka says the same."""
    told = [p for own in owned(group).values() for p in own]
    assert sorted(told) == [f"{group.topics[0]}-{p}" for p in range(partitions)]
    assert all(
        state == "running" for state, own in zip(states(group), owned(group).values()) if own
    )
    described = group._cluster._admin().describe_consumer_groups([group.name])[group.name].result()
    for member in described.members:
        own = [f"{p.topic}-{p.partition}" for p in member.assignment.topic_partitions]
        assert sorted(own) == owned(group)[member.client_id]


def committed(group: Group) -> dict[tuple[str, int], int]:
    asked = ConsumerGroupTopicPartitions(group.name)
    try:
        futures = group._cluster._admin().list_consumer_group_offsets([asked])
        found = futures[group.name].result().topic_partitions
    except KafkaException:
        return {}  # it has never committed
    return {(p.topic, p.partition): p.offset for p in found if p.offset >= 0}


def ends(group: Group) -> dict[tuple[str, int], int]:
    topics = group._cluster.topics()
    topics = topics[topics.topic.isin(group.topics)]
    return {(t, p): int(end) for t, p, end in zip(topics.topic, topics.partition, topics.end)}


# --- who owns what --------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol, assignor", PROTOCOLS)
def test_each_partition_has_one_owner_whoever_comes_or_leaves(
    cluster, orders, name, protocol, assignor
):
    with cluster.group(name, orders, protocol=protocol, assignor=assignor, work_ms=1) as group:
        group.wait_until_stable()
        check_owners(group, 4)
        assert all(len(own) == 2 for own in owned(group).values())
        wait_for(lambda: committed(group) == {k: v for k, v in ends(group).items() if v})
        group.add()
        group.wait_until_stable()
        check_owners(group, 4)
        group.stop(f"{name}-2")
        assert states(group) == ["running", "dead", "running"]
        group.wait_until_stable()
        check_owners(group, 4)
        assert [r["member"] for r in reports(group, "left")] == [f"{name}-2"]
        group.add()
        assert list(group.members.member)[-1] == f"{name}-4"  # no number is given twice


@pytest.mark.parametrize("protocol, assignor", [PROTOCOLS[0], PROTOCOLS[3]])
def test_after_a_kill_and_a_freeze_past_the_session_the_others_take_over(
    cluster, orders, name, protocol, assignor
):
    with cluster.group(name, orders, 3, protocol=protocol, assignor=assignor) as group:
        group.wait_until_stable()
        group.kill(f"{name}-1")
        assert states(group) == ["dead", "running", "running"]
        group.freeze(f"{name}-2")
        pid = group.members.pid[1]
        wait_for(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
        group.wait_until_stable()
        assert states(group) == ["dead", "frozen", "running"]
        check_owners(group, 4)
        assert owned(group)[f"{name}-2"] == []
        group.thaw(f"{name}-2")
        group.wait_until_stable()
        assert states(group) == ["dead", "running", "running"]
        check_owners(group, 4)
        assert [r["member"] for r in reports(group, "lost")] == [f"{name}-2"]
        told = [r["kind"] for r in reports(group, "killed", "frozen", "thawed", "died")]
        assert told == ["killed", "frozen", "thawed"]


@pytest.mark.parametrize("protocol, end", [("classic", "kill"), ("consumer", "stop")])
def test_a_static_member_that_comes_back_in_time_finds_its_partitions_untouched(
    cluster, orders, name, protocol, end
):
    with cluster.group(name, orders, static=True, protocol=protocol) as group:
        group.wait_until_stable()
        before, seen = owned(group), len(reports(group, "assigned", "revoked", "lost"))
        getattr(group, end)(f"{name}-1")
        group.add(f"{name}-1")
        group.wait_until_stable()
        assert owned(group) == before
        changes = reports(group, "assigned", "revoked", "lost")[seen:]
        assert {r["member"] for r in changes} == {f"{name}-1"}


def test_added_partitions_and_a_second_topic_find_owners(cluster, orders, topic, name):
    create(cluster, topic, partitions=1)
    with cluster.group(name, [orders, topic]) as group:
        group.wait_until_stable()
        admin = KafkaAdminClient(bootstrap_servers=cluster.bootstrap)
        admin.create_partitions({topic: 3})
        admin.close()
        wait_for(lambda: len(group._partitions()) == 7)
        group.wait_until_stable()
        assert sum(map(len, owned(group).values())) == 7


def test_a_consumer_of_a_cell_may_take_part(cluster, orders, name):
    with cluster.group(name, orders, 1) as group:
        group.wait_until_stable()
        cell = KafkaConsumer(
            orders,
            group_id=name,
            bootstrap_servers=cluster.bootstrap,
            session_timeout_ms=3000,
            heartbeat_interval_ms=300,
        )
        wait_for(lambda: cell.poll(200) is not None and cell.assignment())
        group.wait_until_stable()
        assert 0 < len(owned(group)[f"{name}-1"]) < 4
        cell.close()
        group.wait_until_stable()
        check_owners(group, 4)


def test_brokers_may_die_under_a_group_and_nothing_outlives_the_cluster(name):
    with labkit.start(brokers=3, name="mortal", fresh=True) as cluster:
        create(cluster, "orders", partitions=3)
        group = cluster.group(name, "orders", work_ms=1)
        group.wait_until_stable()
        described = cluster._admin().describe_consumer_groups([name])[name].result()
        cluster.kill(described.coordinator.id)
        cluster.wait_for("leaders")
        acked = send(cluster, "orders", range(30), acks="all")
        wait_for(lambda: sum(committed(group).values()) == len(acked))
        group.wait_until_stable()
        assert states(group) == ["running", "running"]
        pids = list(group.members.pid)
    assert not any(map(psutil.pid_exists, pids))
    wait_until_gone(lab_folder("mortal"))
    assert repr(group) == f"consumer group {name!r}: closed"
    group.close()


# --- committing and resetting ---------------------------------------------------------------------


@pytest.mark.parametrize("commit, done", [("before", 1), ("after", 0)])
def test_commit_before_or_after_the_work_decides_what_a_kill_does(
    cluster, topic, name, commit, done
):
    create(cluster, topic, partitions=1)
    send(cluster, topic, range(3), acks="all")
    with cluster.group(name, topic, 1, work_ms=60_000, commit=commit) as group:
        if commit == "before":
            wait_for(lambda: committed(group))
        else:
            (member,) = group.members.member
            wait_for(lambda: owned(group)[member])
        group.kill(f"{name}-1")
        assert committed(group).get((topic, 0), 0) == done


def test_a_slowed_member_works_slowly(cluster, topic, name):
    create(cluster, topic, partitions=1)
    with cluster.group(name, topic, 1, work_ms=0) as group:
        group.slow(f"{name}-1", 60_000)
        send(cluster, topic, range(3), acks="all")
        group.wait_until_stable()
        assert reports(group, "slowed")[0]["detail"] == {"ms": 60_000}
        group.kill(f"{name}-1")
        assert committed(group) == {}
        group.add(1)
        wait_for(lambda: committed(group) == {(topic, 0): 3})


FORMS: list[dict[str, Any]] = [
    {"by": -2},
    {"by": -1000},
    {"to": "earliest"},
    {"to": "latest"},
    {"at": 0},
    {"at": datetime(2100, 1, 1)},
]


def check_reset(group: Group, table: Any, form: dict[str, Any]) -> None:
    assert list(table.columns) == ["topic", "partition", "before", "after"]
    end = ends(group)
    keys = list(zip(table.topic, table.partition))
    for key, before, after in zip(keys, table.before.fillna(0), table.after):
        back = {"by": max(0, before + form.get("by", 0)), "to": 0, "at": 0}[next(iter(form))]
        forward = form in (FORMS[3], FORMS[5])
        assert after == (end[key] if forward else back)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_members_that_run_reset_themselves(cluster, orders, name, protocol):
    with cluster.group(name, orders, protocol=protocol, work_ms=1) as group:
        group.wait_until_stable()
        everything = {k: v for k, v in ends(group).items() if v}
        for form in FORMS:
            wait_for(lambda: committed(group).items() >= everything.items())
            seen = len(reports(group, "reset"))
            table = group.reset(**form)
            check_reset(group, table, form)
            told: dict[str, int] = {}
            for report in reports(group, "reset")[seen:]:
                told |= report["detail"][orders]
            assert told == {str(p): after for p, after in zip(table.partition, table.after)}
        wait_for(lambda: committed(group).items() >= everything.items())


def test_a_group_without_members_is_reset_from_outside(cluster, orders, name):
    with cluster.group(name, orders, work_ms=1) as group:
        wait_for(
            lambda: committed(group).items() >= {k: v for k, v in ends(group).items() if v}.items()
        )
        group.stop(f"{name}-1")
        group.kill(f"{name}-2")  # the group counts on it for a while yet: reset waits
        for form in FORMS:
            table = group.reset(**form)
            check_reset(group, table, form)
            for row in table.itertuples():
                assert committed(group)[row.topic, row.partition] == row.after


def test_what_was_read_before_a_reset_is_not_committed_after_it_by_auto_commit(
    cluster, topic, name
):
    create(cluster, topic, partitions=1)
    send(cluster, topic, range(50), acks="all")
    with cluster.group(name, topic, 1, work_ms=0, commit="auto") as group:
        wait_for(lambda: committed(group) == {(topic, 0): 50})
        group.slow(f"{name}-1", 300)
        seen = len(reports(group))
        group.reset(to="earliest")

        def since() -> list[int]:
            told = [r for r in reports(group)[seen:] if r["kind"] == "committed"]
            return [r["detail"][topic]["0"] for r in told]

        # The first may be the client's last word on what it read before.
        wait_for(lambda: len(since()) > 3)
        assert all(offset < 50 for offset in since()[1:])
        assert committed(group)[topic, 0] < 50
        group.kill(f"{name}-1")


# --- predicting -----------------------------------------------------------------------------------


def test_a_prediction_is_compared_after_the_next_rebalance_and_stays(cluster, orders, name):
    with cluster.group(name, orders, 1) as group:
        group.wait_until_stable()
        guess = group.predict({0: f"{name}-1", 3: f"{name}-1"})
        assert "waiting for the next rebalance" in repr(guess)
        group.add()
        group.wait_until_stable()
        assert guess.table.right.tolist() == [True, False]
        assert guess.table.actual.tolist() == [f"{name}-1", f"{name}-2"]
        assert "waiting" not in repr(guess) and "False" in repr(guess)
        detail = {orders: {"0": f"{name}-1", "3": f"{name}-1"}}
        assert [r["detail"] for r in reports(group, "predicted")] == [detail]
        group.stop(f"{name}-2")
        group.wait_until_stable()
        assert guess.table.right.tolist() == [True, False]  # it was about the rebalance before


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_member_that_fails_shows_its_traceback(cluster, orders, name):
    with cluster.group(name, orders, 1, static=True) as group:
        group.wait_until_stable()
        rival = Consumer(
            {
                "bootstrap.servers": cluster.bootstrap,
                "group.id": name,
                "group.instance.id": f"{name}-1",
                "partition.assignment.strategy": "range",
            }
        )
        rival.subscribe([orders])
        wait_for(lambda: rival.poll(0.1) is not None or states(group) == ["failed"])
        wait_for(lambda: states(group) == ["failed"])
        assert "Traceback" in repr(group) and "FENCED" in repr(group)
        assert "member.py" in repr(group)
        (failed,) = reports(group, "failed")
        assert "FENCED" in failed["detail"]["error"]
        assert [r["detail"] for r in reports(group, "died")] == [{"exit": 1}]
        with pytest.raises(labkit.LabError, match="no member of"):
            group.wait_until_stable()
        rival.close()


def test_a_member_killed_from_outside_is_reported_as_dead(cluster, orders, name):
    with cluster.group(name, orders, 1) as group:
        psutil.Process(group.members.pid[0]).kill()
        wait_for(lambda: states(group) == ["dead"])
        assert [r["detail"] for r in reports(group, "died")] == [{"exit": -9}]


def test_a_timeout_says_what_is_missing(cluster, orders, name):
    with cluster.group(name, orders) as group:
        group.wait_until_stable()
        group.kill(f"{name}-1")
        with pytest.raises(labkit.LabError, match=f"still counts on {name}-1") as caught:
            group.wait_until_stable(timeout=0.2)
        assert "timeout=" in caught.value.to_do


BAD_GROUPS: list[tuple[dict[str, Any], str, str]] = [
    ({"name": ""}, "name='' is not possible", "letters"),
    ({"name": "a b"}, "name='a b' is not possible", "letters"),
    ({"topics": "nowhere"}, "there is no topic 'nowhere'", "the topics are"),
    ({"topics": []}, r"topics=\[\] is not possible", "orders"),
    ({"members": 0}, "members=0 is not possible", "1 to 50"),
    ({"members": 2.5}, "members=2.5 is not possible", "1 to 50"),
    ({"members": "3"}, "members='3' is not possible", "1 to 50"),
    ({"members": 60}, "members=60 is not possible", "1 to 50"),
    ({"protocol": "clasic"}, "protocol='clasic'; did you mean 'classic'", "classic, consumer"),
    ({"assignor": "sticky"}, "protocol='classic' with assignor='sticky'", "cooperative-sticky"),
    ({"assignor": "uniform"}, "protocol='classic' with assignor='uniform'", "range"),
    ({"assignor": "roundrobin", "protocol": "consumer"}, "protocol='consumer'", "uniform, range"),
    ({"commit": "afer"}, "commit='afer'; did you mean 'after'", "after, before, auto"),
    ({"work_ms": -1}, "work_ms=-1 is not possible", "milliseconds"),
    ({"work_ms": "1"}, "work_ms='1' is not possible", "milliseconds"),
]


def test_a_group_that_cannot_be_is_refused_and_nothing_is_started(cluster, orders, name):
    before = cluster._lease.ask("status")["processes"]
    for options, what, to_do in BAD_GROUPS:
        with pytest.raises(labkit.LabError, match=what) as caught:
            cluster.group(**({"name": name, "topics": orders} | options))
        assert to_do in caught.value.to_do
        assert cluster._lease.ask("status")["processes"] == before


@pytest.fixture(scope="module")
def lasting(cluster: labkit.Cluster, orders: str) -> Any:
    with cluster.group(f"lasting{os.urandom(3).hex()}", orders, 1) as group:
        group.add()
        group.kill(f"{group.name}-2")
        group.wait_until_stable()
        yield group


BAD_VERBS: list[tuple[str, str, str]] = [
    ("kill('NAMEX-1')", "no member 'NAMEX-1'; did you mean", "its members are"),
    ("kill(1)", "no member 1", "its members are"),
    ("kill('NAME-2')", "cannot kill 'NAME-2': it is dead", "start it again"),
    ("stop('NAME-2')", "cannot stop 'NAME-2': it is dead", "start it again"),
    ("freeze('NAME-2')", "cannot freeze 'NAME-2': it is dead", "start it again"),
    ("thaw('NAME-1')", "cannot thaw 'NAME-1': it is running", "as it should"),
    ("slow('NAME-1', -5)", "work_ms=-5 is not possible", "milliseconds"),
    ("add(0)", "members=0 is not possible", "1 to 50"),
    ("add('NAME-1')", "'NAME-1' is running already", "without a name"),
    ("add('NAME-9')", "no member 'NAME-9'", "its members are"),
    ("reset()", "goes to one place, not to none", "by=-100"),
    ("reset(by=1, to='latest')", "'by': 1, 'to': 'latest'", "give one of"),
    ("reset(by='1')", "by='1' is not possible", "-100"),
    ("reset(to='erliest')", "to='erliest'; did you mean 'earliest'", "latest"),
    ("reset(at='noon')", "at='noon' is not possible", "datetime"),
    ("predict({})", "owners={} is not possible", "shipping-1"),
    ("predict({9: 'NAME-1'})", "reads no partition 9", "partitions are"),
]


def test_a_verb_that_cannot_be_says_why_and_what_to_do(lasting):
    for case in BAD_VERBS:
        call, what, to_do = (text.replace("NAME", lasting.name) for text in case)
        with pytest.raises(labkit.LabError, match=what) as caught:
            eval(f"group.{call}", {"group": lasting})
        assert to_do in caught.value.to_do
        assert states(lasting) == ["running", "dead"]


def test_a_frozen_member_cannot_be_stopped_politely_but_killed(cluster, orders, name):
    with cluster.group(name, orders, 1) as group:
        group.freeze(f"{name}-1")
        with pytest.raises(labkit.LabError, match="it is frozen\nthaw it first, or kill it"):
            group.stop(f"{name}-1")
        group.kill(f"{name}-1")
        assert states(group) == ["dead"]


def test_a_cluster_that_others_run_runs_no_group(cluster, orders, name):
    with (
        labkit.connect(cluster.bootstrap) as theirs,
        pytest.raises(labkit.LabError, match="labkit does not run"),
    ):
        theirs.group(name, orders)


# --- the end --------------------------------------------------------------------------------------


def test_the_cell_that_starts_a_group_can_run_twice(cluster, orders, name):
    first = cluster.group(name, orders)
    first.wait_until_stable()
    pids = list(first.members.pid)
    first.freeze(f"{name}-2")
    second = cluster.group(name, orders)
    assert not any(map(psutil.pid_exists, pids))
    second.wait_until_stable()
    check_owners(second, 4)
    with pytest.raises(labkit.LabError, match=f"the group {name!r} is closed\nstart it again"):
        first.kill(f"{name}-1")
    pids = list(second.members.pid)
    second.close()
    second.close()
    assert not any(map(psutil.pid_exists, pids))
    assert "closed" in repr(second)


HOLD = """
import labkit, sys
from tests.integration.test_cluster import create
cluster = labkit.start(brokers=1, name="held")
if "orders" not in set(cluster.topics().topic):
    create(cluster, "orders", copies=1)
group = cluster.group("shipping", "orders", 3 if sys.argv[1:] else 2)
print(*group.members.pid, flush=True)
sys.stdin.read()
"""


def hold(*more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HOLD, *more],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"LABKIT_GRACE": str(GRACE * 3)},
    )


def test_members_end_with_the_lab_and_a_restarted_kernel_starts_its_group_anew():
    first = hold("one more")
    pids = [int(pid) for pid in first.stdout.readline().split()]
    assert all(map(psutil.pid_exists, pids))
    first.kill()
    second = hold()
    more = [int(pid) for pid in second.stdout.readline().split()]
    assert all(map(psutil.pid_exists, more)) and not any(map(psutil.pid_exists, pids))
    second.kill()
    wait_until_gone(lab_folder("held"))
    assert not any(map(psutil.pid_exists, more))


def test_every_report_keeps_the_contract(lasting):
    lines = (lasting._lease.folder / "reports.jsonl").read_text().splitlines()
    for report in map(json.loads, lines):
        assert list(report) == ["group", "kind", "member", "at", "epoch", "detail"]
        assert report["kind"] in KINDS and report["epoch"] is None
        assert abs(report["at"] / 1000 - time.time()) < 3600
        assert (report["member"] is None) == (report["kind"] == "predicted")
        if report["kind"] in ("assigned", "revoked", "lost"):
            assert all(type(p) is int for own in report["detail"].values() for p in own)
        if report["kind"] in ("position", "committed", "reset"):
            for offsets in report["detail"].values():
                assert all(p.isdecimal() and type(o) is int for p, o in offsets.items())


def test_the_shown_loop_is_the_one_that_runs(lasting):
    assert "consumer.poll(" in lasting.source() and repr(lasting.source()) == str(lasting.source())
    assert "lasting" in repr(lasting) and "running" in repr(lasting)
