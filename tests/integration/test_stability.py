"""A busy laptop must not look like a dead broker, and a dead one must be noticed quickly."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time

import pytest
from kafka import KafkaAdminClient

import labkit
from tests.integration.test_cluster import create


def epochs(cluster: labkit.EmbeddedCluster, topic: str) -> list[tuple[int, int, int]]:
    """Return partition, leader and leader epoch: each election counts, even one won back."""
    admin = KafkaAdminClient(bootstrap_servers=cluster.bootstrap)
    (found,) = admin.describe_topics([topic])
    admin.close()
    return sorted(
        (p["partition_index"], p["leader_id"], p["leader_epoch"]) for p in found["partitions"]
    )


def controller_epoch(cluster: labkit.EmbeddedCluster) -> int:
    states = cluster._lease.folder.glob("node-*/__cluster_metadata-0/quorum-state")
    return max(json.loads(state.read_text())["leaderEpoch"] for state in states)


def under_load(seconds: float) -> None:
    """Keep two cores busy and a producer sending, and see that no partition changes its leader."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2)]
    try:
        with labkit.start(brokers=3, fresh=True, name="loaded") as cluster:
            create(cluster, "load", partitions=6)
            before = epochs(cluster, "load"), controller_epoch(cluster)
            command = (
                "kafka-producer-perf-test --topic load --record-size 100"
                f" --num-records {int(seconds * 2000)} --throughput 2000"
            )
            sent: list[str] = []
            producer = threading.Thread(
                target=lambda: sent.append(cluster.run(command, timeout=seconds * 3 + 60))
            )
            producer.start()
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline or producer.is_alive():
                time.sleep(1)
                assert (epochs(cluster, "load"), controller_epoch(cluster)) == before
            assert sent and "records sent" in sent[0]
            assert cluster.topics().end.sum() == int(seconds * 2000)
            # the same epochs do move when a leader really dies
            cluster.kill(before[0][0][1])
            cluster.wait_for("leaders")
            assert epochs(cluster, "load") != before[0]
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def test_a_busy_machine_causes_no_leader_change():
    under_load(10)


@pytest.mark.soak
def test_five_busy_minutes_cause_no_leader_change():
    under_load(300)
