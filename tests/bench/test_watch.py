"""How fresh the watch is beside the admin API, what it misses, and what it costs."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import ConsumerGroupTopicPartitions, Producer
from confluent_kafka.admin import NewTopic

import labkit
from labkit.cluster.lease import lab_folder
from tests.conftest import processes_of

SECONDS = 30
PARTITIONS = 12


def feed(cluster: labkit.Cluster, stop: threading.Event) -> None:
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "linger.ms": 5})
    number = 0
    while not stop.wait(0.05):
        for _ in range(6):
            producer.produce("orders", str(number), partition=number % PARTITIONS)
            number += 1
        producer.poll(0)
    producer.flush(10)


class Seen:
    """When each partition's committed offset was first seen to be so far, by someone who polls."""

    def __init__(self) -> None:
        self.values: dict[int, list[tuple[int, float]]] = {p: [] for p in range(PARTITIONS)}
        self.owners: list[Any] = []

    def note(self, committed: dict[int, int]) -> None:
        now = time.time()
        for partition, offset in committed.items():
            known = self.values[partition]
            if not known or known[-1][0] != offset:
                known.append((offset, now))

    def delays(self, commits: list[tuple[int, int, float]]) -> list[float]:
        found = []
        for partition, offset, at in commits:
            first = next((t for o, t in self.values[partition] if o >= offset), None)
            if first is not None:
                found.append(first - at)
        return found


def poll_watch(watch: Any, seen: Seen, stop: threading.Event) -> None:
    while not stop.wait(0.02):
        table = watch.offsets("shipping").dropna(subset="committed")
        seen.note(dict(zip(table.partition, table.committed)))


def poll_admin(cluster: Any, seen: Seen, stop: threading.Event) -> None:
    admin = cluster._admin()
    while not stop.wait(0.5):
        asked = admin.list_consumer_group_offsets([ConsumerGroupTopicPartitions("shipping")])
        places = asked["shipping"].result().topic_partitions
        seen.note({place.partition: place.offset for place in places if place.offset >= 0})
        group = admin.describe_consumer_groups(["shipping"])["shipping"].result()
        owners = {
            (place.partition, member.client_id)
            for member in group.members
            for place in member.assignment.topic_partitions
        }
        if not seen.owners or seen.owners[-1] != owners:
            seen.owners.append(owners)


def reported(folder: Path, begin: float) -> list[tuple[int, int, float]]:
    """Return the members' own log of their commits: partition, offset, when."""
    found = []
    for line in (folder / "reports.jsonl").read_text().splitlines():
        report = json.loads(line)
        if report["kind"] == "committed" and report["at"] / 1000 >= begin:
            for partition, offset in report["detail"]["orders"].items():
                found.append((int(partition), offset, report["at"] / 1000))
    return found


def percentiles(values: list[float]) -> str:
    cuts = statistics.quantiles(values, n=20)
    return f"p50 {statistics.median(values):.3f} s, p95 {cuts[-1]:.3f} s of {len(values)}"


@pytest.mark.parametrize("partitions", [5, 50])
def test_how_fresh_it_is_and_what_it_misses(partitions, tmp_path):
    config = {"offsets.topic.num.partitions": partitions}
    with labkit.start(brokers=3, name="fresh", fresh=True, config=config) as cluster:
        cluster._admin().create_topics([NewTopic("orders", PARTITIONS, 3)])["orders"].result()
        cluster.wait_for("leaders", "orders")
        watch = cluster.watch()
        group = cluster.group("shipping", topics="orders", members=4, work_ms=30)
        stop = threading.Event()
        ours, theirs = Seen(), Seen()
        threads = [
            threading.Thread(target=feed, args=(cluster, stop)),
            threading.Thread(target=poll_watch, args=(watch, ours, stop)),
            threading.Thread(target=poll_admin, args=(cluster, theirs, stop)),
        ]
        group.wait_until_stable()
        watch.wait_until_current()
        for thread in threads:
            thread.start()
        time.sleep(3)  # warm up
        begin = time.time()
        time.sleep(SECONDS / 2)
        group.add()
        group.wait_until_stable()
        group.stop("shipping-5")
        group.wait_until_stable()
        time.sleep(SECONDS / 2)
        end = time.time()
        time.sleep(2)
        stop.set()
        for thread in threads:
            thread.join()
        folder = lab_folder("fresh")
        group.close()
        watch.wait_until_current()
        commits = reported(folder, begin)
        events = labkit.open(watch.save(tmp_path / "run.trace"))._events.to_pylist()
    within = [commit for commit in commits if commit[2] < end]
    logged = {(e["partition"], e["offset"]) for e in events if e["kind"] == "commit"}
    generations = {e["epoch"] for e in events if e["kind"] == "generation"}
    polled = {(p, offset) for p, values in theirs.values.items() for offset, _ in values}
    missed = [c for c in within if c[:2] not in polled]
    print(f"\noffsets topic of {partitions} partitions, 4 members, {len(within)} commits:")
    print(f"  watch: {percentiles(ours.delays(within))}")
    print(f"  admin API, twice a second: {percentiles(theirs.delays(within))}")
    print(
        f"  never seen by the admin API: {len(missed)} of {len(within)} commits; it saw "
        f"{len(theirs.owners)} assignments, the watch {len(generations)} generations"
    )
    assert {commit[:2] for commit in commits} <= logged, "the watch saw less than the members did"


KERNEL = """
import sys, labkit
cluster = labkit.start(brokers=3, name="cost", fresh=True)
from confluent_kafka.admin import NewTopic
cluster._admin().create_topics([NewTopic("orders", 12, 3)])["orders"].result()
cluster.wait_for("leaders", "orders")
watch = cluster.watch()
group = cluster.group("shipping", topics="orders", members=4, work_ms=30)
group.wait_until_stable()
watch.wait_until_current()
print(cluster.bootstrap, labkit.watch.session._process.pid, flush=True)
for line in sys.stdin:
    print(len(watch.offsets()), flush=True)
cluster.close()
"""


@pytest.fixture
def kernel() -> Iterator[tuple[subprocess.Popen[str], str, list[psutil.Process]]]:
    """A process that holds three brokers, Spark, a watch and a group of four, as a kernel does."""
    process = subprocess.Popen(
        [sys.executable, "-c", KERNEL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    assert process.stdin and process.stdout
    bootstrap, jvm = process.stdout.readline().split()
    yield process, bootstrap, [psutil.Process(process.pid), psutil.Process(int(jvm))]
    process.stdin.close()
    process.wait(60)
    process.stdout.close()


def cpu(processes: list[psutil.Process], seconds: float) -> float:
    def used() -> float:
        return sum(p.cpu_times().user + p.cpu_times().system for p in processes)

    begin, before = time.monotonic(), used()
    time.sleep(seconds)
    return (used() - before) / (time.monotonic() - begin)


def memory(processes: list[psutil.Process]) -> float:
    return sum(p.memory_full_info().pss for p in processes) / 1e6


def everything(watching: list[psutil.Process]) -> list[psutil.Process]:
    return list({p.pid: p for p in [*processes_of(lab_folder("cost")), *watching]}.values())


def test_what_it_costs(kernel):
    *_, watching = kernel
    time.sleep(10)  # let the start's work end
    idle = cpu(watching, 20)
    print(f"\nidle: Spark and kernel {idle:.1%} of a core")
    print(f"  PSS of Spark and kernel {memory(watching):.0f} MB")
    print(f"  PSS of everything {memory(everything(watching)):.0f} MB")


@pytest.mark.soak
def test_an_hour_of_commits_costs_at_the_end_what_it_did_at_the_beginning(kernel):
    _, bootstrap, watching = kernel
    stop = threading.Event()
    cluster = labkit.connect(bootstrap)
    thread = threading.Thread(target=feed, args=(cluster, stop))
    thread.start()
    try:
        time.sleep(60)
        first = cpu(watching, 120), memory(watching)
        time.sleep(float(os.environ.get("SOAK_MINUTES", "60")) * 60 - 300)
        last = cpu(watching, 120), memory(watching)
    finally:
        stop.set()
        thread.join()
    print(f"\nfirst minutes: {first[0]:.1%} of a core, {first[1]:.0f} MB")
    print(f"last minutes: {last[0]:.1%} of a core, {last[1]:.0f} MB")
    assert last[0] < first[0] * 1.3 + 0.02
    assert last[1] < first[1] * 1.3
