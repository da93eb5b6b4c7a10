"""labkit.start() reuses, heals, replaces, and never stops what another kernel holds."""

from __future__ import annotations

import pytest

import labkit
from labkit.cluster.lease import lab_folder
from tests.conftest import processes_of
from tests.integration.test_orphans import holder, wait_until_gone


@pytest.fixture
def lab():
    with labkit.start(brokers=1, fresh=True) as cluster:
        yield cluster


def cluster_id(cluster: labkit.Cluster) -> str:
    return str(cluster.run("kafka-cluster cluster-id"))


def test_start_again_is_the_same_cluster(lab):
    assert labkit.start() is lab
    assert labkit.start(brokers=1) is lab


def test_start_heals_what_is_dead_or_frozen():
    with labkit.start(brokers=3, fresh=True) as cluster:
        before = cluster.nodes()
        cluster.kill(1)
        cluster.freeze(3)
        assert cluster.nodes().state.tolist() == ["dead", "running", "frozen"]
        assert labkit.start(brokers=3) is cluster
        assert cluster.nodes().state.tolist() == ["running"] * 3
        assert cluster.nodes().address.tolist() == before.address.tolist()
        cluster.wait_for("brokers")


def test_fresh_is_an_empty_one_in_its_place(lab):
    lab.run("kafka-topics --create --topic old")
    before = cluster_id(lab)
    new = labkit.start(fresh=True)
    assert new.topics().empty and cluster_id(new) != before
    assert repr(lab).endswith("closed")
    new.close()


def test_other_settings_replace_this_kernels_cluster(lab):
    with labkit.start(brokers=1, config={"log.retention.hours": 1}) as new:
        assert new is not lab and repr(lab).endswith("closed")


def test_a_name_keeps_both(lab):
    with labkit.start(brokers=1, name="second") as second:
        assert second.bootstrap != lab.bootstrap
        assert lab.nodes().state.tolist() == ["running"] == second.nodes().state.tolist()


def test_what_another_kernel_holds_is_used_but_never_stopped():
    other = holder("brokers=1, name='theirs'")
    bootstrap = other.stdout.readline().strip()
    mine = labkit.start(name="theirs")
    assert mine.bootstrap == bootstrap
    for change in ({"fresh": True}, {"brokers": 3}):
        with pytest.raises(labkit.LabError) as raised:
            labkit.start(name="theirs", **change)
        assert f"pid {other.pid}" in raised.value.what
        assert "name=" in raised.value.to_do
    mine.close()  # lets go, and the other goes on
    assert len(processes_of(lab_folder("theirs"))) >= 2
    other.kill()
    other.wait()
    wait_until_gone(lab_folder("theirs"))


def test_a_lab_belongs_to_one_workspace(lab, monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_WORKSPACE", str(tmp_path))
    with labkit.start(brokers=1) as elsewhere:
        assert elsewhere.bootstrap != lab.bootstrap
    assert lab.nodes().state.tolist() == ["running"]
