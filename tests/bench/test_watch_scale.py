"""How quickly Spark decodes and folds a long log: ratios to reading it raw, in the same run."""

from __future__ import annotations

import os
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import NewTopic

import labkit
from labkit import runtime
from labkit.cluster.guard import tether
from labkit.cluster.plan import free_ports
from labkit.watch import log, session, tables
from labkit.watch.decode import SCHEMA, decode

GROUPS, PARTITIONS = 20, 12
SIZES = {"small": 100_000, "large": 1_000_000}


def string(text: str) -> bytes:
    return struct.pack(">h", len(text)) + text.encode()


def fill(cluster: labkit.Cluster, topic: str, commits: int) -> None:
    """Write what a coordinator writes for so many commits, as the records that they are."""
    cluster._admin().create_topics([NewTopic(topic, 4, 1)])[topic].result()
    cluster.wait_for("leaders", topic)
    keys = [
        (group % 4, struct.pack(">h", 1) + string(f"group-{group}") + string("orders"), partition)
        for group in range(GROUPS)
        for partition in range(PARTITIONS)
    ]
    pairs = [(place, head + struct.pack(">i", partition)) for place, head, partition in keys]
    producer = Producer(
        {"bootstrap.servers": cluster.bootstrap, "queue.buffering.max.messages": 500_000}
    )
    now = int(time.time() * 1000)
    for i in range(commits):
        place, key = pairs[i % len(pairs)]
        value = struct.pack(">hqi", 4, i, -1) + b"\x01" + struct.pack(">q", now) + b"\x00"
        producer.produce(topic, value, key, partition=place)
        if i % 10_000 == 0:
            producer.poll(0)
    assert producer.flush(120) == 0


def records(spark: Any, cluster: labkit.Cluster, topic: str) -> Any:
    options = log.options(cluster.bootstrap, {}, range(4)) | {"assign": f'{{"{topic}":[0,1,2,3]}}'}
    return spark.read.format("kafka").options(**options).load()


def raw(df: Any) -> None:
    df.select(*log.COLUMNS).write.format("noop").mode("overwrite").save()


def decoded(df: Any) -> None:
    df.select(*log.COLUMNS).mapInArrow(decode, SCHEMA).write.format("noop").mode("overwrite").save()


def folded(df: Any) -> None:
    found = tables(df)
    assert len(found.groups) == GROUPS and len(found.offsets()) == GROUPS * PARTITIONS
    assert not found.unknown


def timed(work: Callable[[Any], None], df: Any) -> float:
    begin = time.monotonic()
    work(df)
    return time.monotonic() - begin


def measure(spark: Any, cluster: labkit.Cluster, rounds: int = 5) -> dict[tuple[str, str], float]:
    works = {"raw": raw, "decoded": decoded, "folded": folded}
    inputs = {size: records(spark, cluster, size) for size in SIZES}
    times: dict[tuple[str, str], list[float]] = {}
    for round in range(rounds + 1):  # the first warms up
        for size, df in inputs.items():
            for name, work in works.items():
                seconds = timed(work, df)
                if round:
                    times.setdefault((size, name), []).append(seconds)
    return {key: statistics.median(values) for key, values in times.items()}


@pytest.fixture(scope="module")
def lab() -> Iterator[labkit.EmbeddedCluster]:
    with labkit.start(brokers=1, name="scale", fresh=True) as cluster:
        for topic, commits in SIZES.items():
            fill(cluster, topic, commits)
        yield cluster


def show(title: str, medians: dict[tuple[str, str], float]) -> None:
    print(f"\n{title}, medians of warm interleaved runs:")
    for size, commits in SIZES.items():
        read = medians[size, "raw"]
        for name in ("raw", "decoded", "folded"):
            seconds = medians[size, name]
            print(
                f"  {commits:>9,} commits {name:<8} {seconds:6.2f} s, "
                f"{read / seconds:.2f} of the rate of reading raw"
            )
    for name in ("raw", "decoded", "folded"):
        ratio = medians["large", name] / medians["small", name]
        print(f"  {name}: ten times the log takes {ratio:.1f} times as long")


def test_a_million_commits(lab):
    medians = measure(lab.spark(), lab)
    show("Spark in this process", medians)
    assert medians["large", "raw"] / medians["large", "decoded"] >= 0.5
    assert medians["large", "raw"] / medians["large", "folded"] >= 1 / 3
    for name in ("decoded", "folded"):
        assert medians["large", name] / medians["small", name] < 13


def java_home(folder: Path) -> Path:
    """Make a JAVA_HOME for workers, which ask for a module that our Java lacks."""
    script = folder / "java" / "bin" / "java"
    script.parent.mkdir(parents=True)
    script.write_text(f"""#!/bin/sh
for argument; do
  shift
  [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec "{runtime.java()}" "$@"
""")
    script.chmod(0o755)
    return folder / "java"


JOB = """
import sys, labkit
from tests.bench import test_watch_scale as bench
cluster = labkit.connect(sys.argv[1])
bench.show("the same on a master with two workers", bench.measure(cluster.spark(), cluster, 2))
cluster.close()
"""


def test_the_same_job_on_a_spark_master_with_two_workers(lab, tmp_path):
    port, *others = free_ports(3)
    java = session.java(runtime.jars("spark"), "512m", [])
    package = "org.apache.spark.deploy"
    address = f"spark://127.0.0.1:{port}"
    environment = os.environ | {
        "JAVA_HOME": str(java_home(tmp_path)),
        "SPARK_SCALA_VERSION": "2.13",
        "SPARK_HOME": str(session.spark_home()),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    started: list[subprocess.Popen[bytes]] = []
    with (tmp_path / "log").open("wb") as output:

        def begin(*words: str) -> None:
            begun = tether([*java, *words], env=environment, stdout=output, stderr=output)
            started.append(begun)

        try:
            ui = ["--webui-port", "0"]
            begin(f"{package}.master.Master", "--host", "127.0.0.1", "--port", str(port), *ui)
            for worker in others:
                folder = str(tmp_path / f"worker-{worker}")
                where = ["--host", "127.0.0.1", "--port", str(worker), "-d", folder]
                begin(f"{package}.worker.Worker", "-c", "1", "-m", "1g", *where, *ui, address)
            argv = [sys.executable, "-c", JOB, lab.bootstrap]
            done = subprocess.run(
                argv, env=environment | {"SPARK_MASTER": address}, text=True, timeout=600
            )
            assert done.returncode == 0, (tmp_path / "log").read_text()[-3000:]
        finally:
            for process in started:
                for child in psutil.Process(process.pid).children(recursive=True):
                    child.kill()
                process.kill()
                process.wait()
