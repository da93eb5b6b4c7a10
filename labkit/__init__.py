"""Start, break, watch and check a real Kafka cluster from a notebook.

runtime   Java, jars, the cache folder      aot      caches that make JVMs start quickly
cluster   start and break brokers           views    tables to figures
groups    members as processes, %%spawn     course   exercises, hints, progress
watch     Spark: who owns what, live        cli      the command line
"""

import sys

from labkit.errors import LabError

if sys.platform == "win32":
    raise LabError(
        "labkit runs on Linux and macOS: its clusters are processes that it must be able to freeze",
        "use WSL: `wsl --install` in a terminal, then follow the README there",
    )

from labkit.cluster import Cluster, EmbeddedCluster, connect, start
from labkit.course import exercises
from labkit.groups import spawn
from labkit.watch import open

__all__ = ["Cluster", "EmbeddedCluster", "LabError", "connect", "exercises", "open", "start"]

spawn.register()
