"""labkit.connect looks at a cluster that someone else runs, and leaves no trace in it."""

from __future__ import annotations

import pytest

import labkit
from tests.integration.test_cluster import create, send


@pytest.fixture(scope="module")
def theirs():
    with labkit.start(brokers=1, name="theirs", fresh=True) as cluster:
        yield cluster


def end_offsets(cluster: labkit.Cluster) -> dict[tuple[str, int], int]:
    table = cluster.topics(internal=True)
    return dict(zip(zip(table.topic, table.partition), table.end))


def test_the_same_tables_for_a_cluster_that_exists(theirs):
    create(theirs, "orders", partitions=2, copies=1)
    send(theirs, "orders", range(5))
    with labkit.connect(theirs.bootstrap) as cluster:
        assert cluster.brokers == [1]
        assert cluster.topics().equals(theirs.topics())
        assert "orders" in cluster.run("kafka-topics --list")
        assert "1 broker" in repr(cluster)
        cluster.wait_for("leaders")


def test_looking_writes_nothing(theirs):
    before = end_offsets(theirs)
    with labkit.connect(theirs.bootstrap) as cluster:
        repr(cluster), cluster._repr_mimebundle_(), cluster.topics(internal=True), cluster.nodes()
        with pytest.raises(labkit.LabError):
            cluster.wait_for("leaders", topic="not-there")
    assert end_offsets(theirs) == before
    assert "not-there" not in set(theirs.topics().topic)


@pytest.mark.parametrize(
    "verb", ["kill", "stop", "freeze", "thaw", "restart", "log", "segments", "add_broker"]
)
def test_verbs_that_need_its_processes_or_files_say_so(theirs, verb):
    with labkit.connect(theirs.bootstrap) as cluster:
        arguments = [] if verb == "add_broker" else [1]
        with pytest.raises(labkit.LabError, match="labkit does not run"):
            getattr(cluster, verb)(*arguments)
    assert theirs.nodes().state.eq("running").all()
