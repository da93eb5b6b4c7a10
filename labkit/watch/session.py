"""The SparkSession of this process: started quickly and quietly, and ended with its last user."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from labkit import aot, runtime
from labkit.cluster.guard import tether
from labkit.errors import LabError
from labkit.progress import Progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

START_WITHIN = 60.0  # seconds
HEAP = "768m"

# What Spark's own launcher asks of Java 17 and later, but for a module that ours does not have.
OPENED = [
    f"java.base/{package}"
    for package in (
        *("java.lang", "java.lang.invoke", "java.lang.reflect", "java.io", "java.net", "java.nio"),
        *("java.util", "java.util.concurrent", "java.util.concurrent.atomic", "jdk.internal.ref"),
        *("sun.nio.ch", "sun.nio.cs", "sun.util.calendar"),
    )
]

SETTINGS = {
    "spark.app.name": "labkit",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.adaptive.enabled": "false",  # planning again costs more than it saves at our sizes
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "50000",
    # Without this the Kafka source leaves out internal topics, and says nothing.
    "spark.sql.streaming.kafka.useDeprecatedOffsetFetching": "true",
    "spark.sql.streaming.minBatchesToRetain": "2",
    "spark.sql.streaming.stopTimeout": "5s",
    "spark.sql.streaming.noDataMicroBatches.enabled": "false",
    "spark.sql.streaming.metricsEnabled": "false",
    "spark.sql.streaming.numRecentProgressUpdates": "2",
}

_lock = threading.RLock()
_users: set[int] = set()  # ids of the clusters that asked for it
_process: subprocess.Popen[bytes] | None = None


def session(user: object) -> SparkSession:
    """Return this process's SparkSession, starting it if there is none."""
    global _process
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    with _lock:
        active = SparkSession.getActiveSession()
        if active is not None and _process is None:
            raise LabError(
                "this kernel has a SparkSession already, without the Kafka connector",
                "end it with its stop(), restart the kernel, and ask the cluster for one",
            )
        if _process is None or _process.poll() is not None:
            _end()
            with Progress("Starting Spark") as progress:
                jars = runtime.jars("spark")
                progress.step("the JVM")
                _process, port, secret = _launch(jars)
                os.environ |= {"PYSPARK_GATEWAY_PORT": port, "PYSPARK_GATEWAY_SECRET": secret}
                os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
                progress.step("the session")
                try:
                    made = SparkSession.builder.getOrCreate()
                    made.sparkContext.setLogLevel("OFF")
                except Exception as error:
                    master = os.environ.get("SPARK_MASTER", "local[2]")
                    _end()
                    raise LabError(
                        f"Spark did not start with the master {master!r}: {_first_line(error)}",
                        "set SPARK_MASTER to a master that answers, or unset it",
                    ) from None
                finally:
                    del os.environ["PYSPARK_GATEWAY_PORT"], os.environ["PYSPARK_GATEWAY_SECRET"]
        _users.add(id(user))
        assert SparkContext._active_spark_context is not None
        return SparkSession.builder.getOrCreate()


def release(user: object) -> None:
    """Note that a cluster needs Spark no longer; with the last one its JVM ends."""
    with _lock:
        _users.discard(id(user))
        if not _users:
            _end()


def _end() -> None:
    global _process
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    if _process is None:
        return
    with contextlib.suppress(Exception):  # a JVM that is gone cannot be asked to stop
        if SparkContext._active_spark_context is not None and _process.poll() is None:
            SparkContext._active_spark_context.stop()
    with contextlib.suppress(Exception):
        if SparkContext._gateway is not None:
            SparkContext._gateway.shutdown()
    SparkContext._gateway = SparkContext._jvm = SparkContext._active_spark_context = None
    SparkSession._instantiatedSession = None
    assert _process.stdin is not None
    with contextlib.suppress(OSError):
        _process.stdin.close()  # the JVM ends with its standard input, as it does when we die
    try:
        _process.wait(5)
    except subprocess.TimeoutExpired:
        _process.kill()
        _process.wait()
    shutil.rmtree(_folder(), ignore_errors=True)
    _process = None


def _folder() -> Path:
    return runtime.home() / "spark" / str(os.getpid())


def scratch(name: str) -> Path:
    """Return a folder for Spark's files that does not outlive this process for long."""
    folder = runtime.make_folder(_folder().parent)
    for old in folder.iterdir():
        if old.name.isdecimal() and not psutil.pid_exists(int(old.name)):
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{name}-", dir=runtime.make_folder(_folder())))


def _launch(jars: list[Path]) -> tuple[subprocess.Popen[bytes], str, str]:
    """Start the JVM without Spark's shell scripts, which would start another one first."""
    folder = scratch("jvm")
    told, log = folder / "gateway", folder / "log"
    environment = os.environ | {
        "_PYSPARK_DRIVER_CONN_INFO_PATH": str(told),
        "SPARK_HOME": str(spark_home()),
        "SPARK_CONNECT_MODE": "0",
    }
    # A JVM dies with us at once where the system can see to that, else when its input ends.
    main = threading.current_thread() is threading.main_thread()
    with log.open("wb") as output:
        process = (tether if main else subprocess.Popen)(
            command(jars, aot.flags("spark"), folder),
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the cell, not for the JVM
        )
    deadline = time.monotonic() + START_WITHIN
    while not told.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            raise LabError(
                f"Spark's JVM did not start: {_first_line(log.read_text(errors='replace'))}",
                "see `labkit doctor`; on a machine under load try again",
            )
        time.sleep(0.02)
    (port,), (length,) = (struct.unpack(">i", told.read_bytes()[i : i + 4]) for i in (0, 4))
    return process, str(port), told.read_bytes()[8 : 8 + length].decode()


def command(jars: list[Path], flags: list[str], folder: Path) -> list[str]:
    """Return the command line of the driver's JVM."""
    settings = SETTINGS | {
        "spark.master": os.environ.get("SPARK_MASTER", "local[2]"),
        "spark.local.dir": str(folder),
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
    }
    if not settings["spark.master"].startswith("local"):
        settings["spark.jars"] = ",".join(map(str, jars))  # for its workers
    return [
        *java(jars, HEAP, flags),
        f"-Dlog4j2.configurationFile={Path(__file__).parent / 'log4j2.properties'}",
        f"-Djava.io.tmpdir={folder}",
        "org.apache.spark.deploy.SparkSubmit",
        *(part for key, value in settings.items() for part in ("--conf", f"{key}={value}")),
        "pyspark-shell",
    ]


def java(jars: list[Path], heap: str, flags: list[str]) -> list[str]:
    """Return the beginning of a command line for one of Spark's programs."""
    classes = [*sorted((spark_home() / "jars").glob("*.jar")), *jars]
    return [
        runtime.java(),
        f"-Xmx{heap}",
        "-XX:+UseSerialGC",
        "-XX:TieredStopAtLevel=1",
        "-Xss4m",  # Spark's planner recurses deeply
        "-XX:-UsePerfData",
        *flags,
        *(f"--add-opens={package}=ALL-UNNAMED" for package in OPENED),
        "-XX:+IgnoreUnrecognizedVMOptions",  # an older Java has no such warnings to silence
        "--enable-native-access=ALL-UNNAMED",
        "--sun-misc-unsafe-memory-access=allow",
        "-Dio.netty.tryReflectionSetAccessible=true",
        "-Dio.netty.allocator.type=pooled",
        "-cp",
        os.pathsep.join(map(str, classes)),
    ]


def spark_home() -> Path:
    """Return the folder of PySpark, which brings Spark's jars."""
    import pyspark

    return Path(pyspark.__file__).parent


def _first_line(error: object) -> str:
    lines: Iterator[str] = (line.strip() for line in str(error).splitlines())
    return next((line for line in lines if line), "it said nothing")
