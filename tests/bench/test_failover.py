"""How long a partition is without a leader after its leader is killed."""

from __future__ import annotations

import statistics
import time

import labkit
from tests.integration.test_cluster import create

ROUNDS = 5


def seconds_without_leader(active_controller: bool) -> float:
    with labkit.start(brokers=3, fresh=True, name="bench") as cluster:
        create(cluster, "orders", partitions=6)
        nodes = cluster.nodes()
        victim = int(nodes[nodes.active_controller == active_controller].node.iloc[0])
        assert victim in set(cluster.topics().leader)
        begin = time.monotonic()
        cluster.kill(victim)
        cluster.wait_for("leaders", topic="orders")
        return time.monotonic() - begin


def test_a_killed_leader_is_replaced():
    for active_controller in (False, True):
        times = sorted(round(seconds_without_leader(active_controller), 2) for _ in range(ROUNDS))
        role = "active controller too" if active_controller else "a broker only"
        print(
            f"leader killed ({role}): {statistics.median(times):.2f} s until replaced, of {times}"
        )
