"""AOT caches: what a JVM learned once about starting Kafka or Spark, to start in half the time.

``python -m labkit.aot`` makes them, in the background and at low priority, after a first start;
``python -m labkit.aot spark`` the one of Spark.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from labkit import runtime
from labkit.cluster.guard import tether
from labkit.cluster.plan import Node, free_ports, write_node
from labkit.cluster.tools import main_class

FIRST_JAVA = 25  # the first whose caches can be made in one run


def cache_file(kind: str) -> Path | None:
    """Return where the cache of a kind of JVM belongs, or None if Java has no such."""
    release = Path(runtime.java()).resolve().parents[1] / "release"
    try:
        text = release.read_text()
        major = int(text.split('JAVA_VERSION="')[1].split(".")[0].strip('"\n'))
    except (OSError, IndexError, ValueError):
        return None
    if major < FIRST_JAVA:
        return None
    # A cache is of use only to the very Java, jars and flags that it was made with.
    mark = hashlib.sha256(text.encode())
    for jar in runtime.jars("spark" if kind == "spark" else "kafka"):
        mark.update(f"{jar}{jar.stat().st_mtime_ns}".encode())
    mark.update((_session_file() if kind == "spark" else Path(runtime.__file__)).read_bytes())
    return runtime.home() / "aot" / f"{kind}-{mark.hexdigest()[:16]}.aot"


def flags(kind: str) -> list[str]:
    """Return the JVM flags that use the cache, or none while there is none."""
    path = cache_file(kind)
    if path is None or not path.exists():
        return []
    return [f"-XX:AOTCache={path}", "-Xlog:disable"]  # one that the JVM refuses is no one's worry


def forget() -> None:
    """Remove the caches, after a JVM that used one did not start."""
    for path in (runtime.home() / "aot").glob("*.aot"):
        path.unlink(missing_ok=True)


def _session_file() -> Path:
    return Path(__file__).parent / "watch" / "session.py"  # its flags; importing it takes long


def missing(*kinds: str) -> bool:
    """Tell whether caches could be made that are not there."""
    paths = [cache_file(kind) for kind in kinds or ("broker", "tool")]
    return any(path is not None and not path.exists() for path in paths)


def train(spark: bool = False) -> None:
    """Run Spark, or a broker and a tool, once, and keep what their JVMs learned."""
    folder = runtime.make_folder(runtime.home() / "aot")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one training at a time; what it made, we need not
        if not missing(*(["spark"] if spark else [])):
            return
        for left in folder.glob("training-*"):
            shutil.rmtree(left, ignore_errors=True)
        with tempfile.TemporaryDirectory(dir=folder, prefix="training-") as work:
            kinds = _train_spark(Path(work)) if spark else _train_in(Path(work))
            for kind in kinds:
                _keep(kind, Path(work) / f"{kind}.aot")


def _keep(kind: str, made: Path) -> None:
    kept = cache_file(kind)
    if made.exists() and kept is not None:
        for old in kept.parent.glob(f"{kind}-*.aot"):
            old.unlink()
        made.replace(kept)


def _train_spark(work: Path) -> list[str]:
    """Read some rows through Arrow, in a batch and as a stream: what a watch begins with."""
    program = (
        "import sys, time\n"
        "from labkit import aot\n"
        "aot.flags = lambda kind: ['-XX:AOTCacheOutput=' + sys.argv[1]]\n"
        "from labkit.watch import session\n"
        "spark = session.session(session)\n"
        "spark.range(1000).selectExpr('id', 'cast(id as string) s').toArrow()\n"
        "rows = spark.readStream.format('rate').load()\n"
        "query = rows.writeStream.foreachBatch(lambda df, n: df.toArrow())\n"
        "query = query.option('checkpointLocation', sys.argv[1] + '.work').start()\n"
        "query.processAllAvailable(); query.stop()\n"
        "kafka = {'kafka.bootstrap.servers': '127.0.0.1:1', 'subscribe': 'none'}\n"
        "spark.read.format('kafka').options(**kafka).load()\n"
        "session._process.stdin.close(); session._process.wait()"
    )
    argv = [sys.executable, "-c", program, str(work / "spark.aot")]
    process = tether(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(timeout=240)
    finally:
        process.kill()
    return ["spark"]


def _train_in(work: Path) -> list[str]:
    port, controller = free_ports(2)
    node = Node(1, ("broker", "controller"), port, controller)
    properties = write_node(work, node, [node], "AAAAAAAAAAAAAAAAAAAAAA", {})
    broker = tether(
        runtime.jvm("256m", [f"-XX:AOTCacheOutput={work}/broker.aot"], "kafka.Kafka", properties),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    bootstrap = ["--bootstrap-server", f"127.0.0.1:{port}"]
    _tool(
        [f"-XX:AOTCacheOutput={work}/tool.aot"],
        "kafka-topics",
        *bootstrap,
        "--create",
        "--topic",
        "training",
        "--partitions",
        "3",
    )
    _tool(
        [],
        "kafka-producer-perf-test",
        *bootstrap,
        "--topic",
        "training",
        "--num-records",
        "2000",
        "--record-size",
        "100",
        "--throughput",
        "-1",
    )
    _tool(
        [],
        "kafka-console-consumer",
        *bootstrap,
        "--topic",
        "training",
        "--from-beginning",
        "--max-messages",
        "2000",
        "--group",
        "training",
    )
    broker.send_signal(signal.SIGTERM)  # the cache is written on the way out
    broker.wait(timeout=120)
    return ["broker", "tool"]


def _tool(aot: list[str], name: str, *arguments: str) -> None:
    process = tether(
        runtime.jvm("256m", aot, main_class(name), *arguments),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        process.wait(timeout=120)
    finally:
        process.kill()


if __name__ == "__main__":
    os.nice(10)
    with contextlib.suppress(subprocess.TimeoutExpired):
        train(spark=sys.argv[1:] == ["spark"])
