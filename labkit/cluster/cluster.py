"""A cluster to look at: its nodes, topics and offsets, and Kafka's own tools, wherever it runs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

import pandas as pd
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

from labkit import views
from labkit.cluster import tools
from labkit.cluster.tools import Text
from labkit.errors import LabError, nearest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from labkit.groups import Group
    from labkit.watch.stream import Watch

ANSWER_WITHIN = 4.0  # seconds: a table of what is known now is worth more than a complete one later
KNOWN_WITHIN = 2.0  # seconds: a topic just made is known to the controller first, then to brokers


class Cluster:
    """A Kafka cluster; on its own, one that others run: to be looked at, not to be broken."""

    def __init__(self, bootstrap: str, client: dict[str, Any] | None = None) -> None:
        self._bootstrap = bootstrap
        self._client = client or {}
        self._admin_client: AdminClient | None = None
        self._closed = False
        self._folder: Path | None = None  # of its files, if they are within our reach
        self._watch: Watch | None = None
        self._groups: dict[str, Group] = {}

    # --- what there is ----------------------------------------------------------------------------

    @property
    def bootstrap(self) -> str:
        """The addresses to give to a client as its bootstrap servers."""
        self._check_open()
        return self._bootstrap

    @property
    def brokers(self) -> list[int]:
        """The ids of the brokers."""
        self._check_open()
        return sorted(self._metadata().brokers)

    def nodes(self) -> pd.DataFrame:
        """Return a table of the nodes: node, roles, address, state, active_controller."""
        self._check_open()
        return self._nodes(self._metadata())

    def topics(self, internal: bool = False) -> pd.DataFrame:
        """Return topic, partition, leader, replicas, isr, start, end; NA where nobody can tell."""
        self._check_open()
        return self._topics(self._metadata(), internal)

    def segments(
        self, topic: str, partition: int | None = None, broker: int | None = None
    ) -> pd.DataFrame:
        """Return what is in a topic's files, one row a record, as kafka-dump-log reads them."""
        self._cannot("read its files")

    def log(self, broker: int, lines: int = 40) -> Text:
        """Return the last lines of a broker's own log."""
        self._cannot("read its logs")

    def run(self, command: str, input: str | None = None, timeout: float = 60.0) -> Text:
        """Run one of Kafka's command-line tools, with the bootstrap server filled in."""
        self._check_open()
        return tools.run_tool(command, self._bootstrap, input, timeout)

    def spark(self) -> SparkSession:
        """Return an ordinary SparkSession with the Kafka connector on board.

        ``SPARK_MASTER`` in the environment moves it to a Spark cluster.
        """
        from labkit.watch import session

        self._check_open()
        made = session.session(self)
        self._train("spark")
        return made

    def watch(self) -> Watch:
        """Follow every group: who owns what, and how far it has read. It writes nothing."""
        from labkit.watch.stream import Watch

        self._check_open()
        if self._watch is None or self._watch.closed:
            self.spark()
            self._watch = Watch(self)
        return self._watch

    # --- breaking it ------------------------------------------------------------------------------

    def kill(self, broker: int) -> None:
        """End a broker as a power cut would (SIGKILL)."""
        self._cannot("kill its brokers")

    def stop(self, broker: int) -> None:
        """Shut a broker down politely (SIGTERM): it hands its leaderships over first."""
        self._cannot("stop its brokers")

    def freeze(self, broker: int) -> None:
        """Stop a broker in its tracks (SIGSTOP): it is there and does not answer."""
        self._cannot("freeze its brokers")

    def thaw(self, broker: int) -> None:
        """Let a frozen broker go on (SIGCONT)."""
        self._cannot("thaw its brokers")

    def restart(self, broker: int) -> None:
        """Start a broker again on its port and its data, stopping it first if it runs."""
        self._cannot("restart its brokers")

    def add_broker(self) -> int:
        """Add an empty broker and return its id."""
        self._cannot("add a broker")

    # --- reading from it as a group ---------------------------------------------------------------

    def group(self, name: str, topics: str | list[str], members: int = 2, **options: Any) -> Group:
        """Run a consumer group whose members are processes.

        ``assignor``: "range", "roundrobin" or "cooperative-sticky"; "uniform" or "range" with
        ``protocol="consumer"``, the server-side one. ``static``: members keep their partitions over
        a restart. ``work_ms``: how long a record takes. ``commit``: "after" the work, "before" it
        or "auto". ``config``: settings of confluent-kafka's for every member.
        """
        from labkit.groups import Group  # it builds on clusters

        return Group(self, name, topics, members, **options)

    # --- waiting ----------------------------------------------------------------------------------

    def wait_for(self, condition: str, topic: str | None = None, timeout: float = 30.0) -> None:
        """Wait for "brokers" to be up, partitions to have "leaders" or be "in-sync", a "topic"."""
        self._check_open()
        conditions: dict[str, Callable[[pd.DataFrame], str]] = {
            "brokers": lambda table: self._missing_brokers(),
            "leaders": lambda table: self._leaderless(table),
            "in-sync": lambda table: self._out_of_sync(table),
            "topic": lambda table: "" if len(table) else f"there is no topic {topic!r}",
        }
        if condition not in conditions:
            raise LabError(
                f"no condition is called {condition!r}{nearest(condition, conditions)}",
                f"wait for one of: {', '.join(conditions)}",
            )
        begin = time.monotonic()
        deadline = begin + timeout
        while True:
            table = self.topics(internal=True)
            if topic is not None:
                table = table[table.topic == topic]
            unknown = topic is not None and table.empty and condition != "topic"
            if unknown and time.monotonic() > min(begin + KNOWN_WITHIN, deadline):
                raise self._unknown_topic(str(topic))
            problem = "it is unknown" if unknown else conditions[condition](table)
            if not problem:
                return
            if time.monotonic() > deadline:
                raise LabError(
                    f"after {timeout:.0f} s, {problem}",
                    "look at the cluster (just type its name), or give more time with timeout=",
                )
            time.sleep(0.05)

    def _missing_brokers(self) -> str:
        nodes = self.nodes()
        alive = set(self._metadata().brokers)
        expected = set(nodes[nodes.roles.str.contains("broker")].node)
        missing = expected - alive or set(nodes[~nodes.state.isin(["running", "unknown"])].node)
        return f"these brokers are not up: {_ids(missing)}" if missing else ""

    def _leaderless(self, table: pd.DataFrame) -> str:
        nodes = self.nodes()
        dead = set(nodes[nodes.state.isin(["dead", "frozen"])].node)
        without = table[table.leader.isna() | table.leader.isin(dead)]
        return (
            f"{len(without)} partitions have no living leader: {_names(without)}"
            if len(without)
            else ""
        )

    def _out_of_sync(self, table: pd.DataFrame) -> str:
        behind = table[
            [set(isr) != set(replicas) for isr, replicas in zip(table.isr, table.replicas)]
        ]
        return (
            f"{len(behind)} partitions have replicas out of sync: {_names(behind)}"
            if len(behind)
            else ""
        )

    # --- how it looks -----------------------------------------------------------------------------

    def __repr__(self) -> str:
        return self._repr_mimebundle_()["text/plain"]

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        if self._closed:
            return {"text/plain": f"{self._name()}: closed"}
        try:
            metadata = self._metadata()
            tables = self._nodes(metadata), self._topics(metadata, False)
        except LabError as error:
            return {"text/plain": f"{self._name()}: {error.what}\n{error.to_do}"}
        svg = views.cluster_map(*tables, title=self._name())
        text = views.cluster_summary(*tables, self._name())
        return {"text/plain": text, "text/html": svg, "image/svg+xml": svg}

    def _name(self) -> str:
        return f"Kafka cluster at {self._bootstrap}"

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """Let go of the cluster; one that others run goes on."""
        self._closed = True
        if self._watch is not None:
            self._watch.close()  # first: a stream whose cluster is gone is slow to stop
        for group in self._groups.values():
            group._asker.close()
        if "labkit.watch.session" in sys.modules:
            sys.modules["labkit.watch.session"].release(self)
        self._drop_admin()

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- asking the brokers -----------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise LabError("this cluster is closed", "start one with labkit.start()")

    def _cannot(self, what: str) -> NoReturn:
        self._check_open()
        raise LabError(
            f"labkit does not run {self._bootstrap}, so it cannot {what}",
            "use a cluster from labkit.start() for that",
        )

    def _train(self, *kinds: str) -> None:
        """Have caches made that let JVMs start quicker, where a lab can do that beside its work."""

    def _living_addresses(self) -> str:
        return self._bootstrap

    def _unknown_topic(self, topic: str) -> LabError:
        known = sorted(self._metadata().topics)
        return LabError(
            f"there is no topic {topic!r}{nearest(topic, known)}",
            f"the topics are: {', '.join(known) or 'none yet'}",
        )

    def _admin(self) -> AdminClient:
        if self._admin_client is None:
            settings = {
                "bootstrap.servers": self._bootstrap,
                "reconnect.backoff.ms": 20,
                "reconnect.backoff.max.ms": 200,
                "socket.connection.setup.timeout.ms": 2000,
                "socket.timeout.ms": 4000,
                "log_level": 0,  # what goes wrong we say ourselves
                "error_cb": lambda error: None,
            }
            try:
                self._admin_client = AdminClient(settings | self._client)
            except KafkaException as error:
                raise LabError(
                    f"cannot connect to {self._bootstrap}: {error.args[0].str()}",
                    "correct the security settings",
                ) from None
        return self._admin_client

    def _drop_admin(self) -> None:
        # The client, on its way out, may wait for ever for the thread of a broker that has died.
        dropped, self._admin_client = [self._admin_client], None
        threading.Thread(target=dropped.clear, daemon=True).start()

    def _metadata(self) -> Any:
        try:
            return self._admin().list_topics(timeout=ANSWER_WITHIN)
        except KafkaException as error:
            raise LabError(
                f"no broker of {self._bootstrap} answered within {ANSWER_WITHIN:.0f} s "
                f"({error.args[0].str()})",
                "check the address and the security settings, and that the cluster is well",
            ) from None

    def _nodes(self, metadata: Any) -> pd.DataFrame:
        rows = [
            (b.id, "broker", f"{b.host}:{b.port}", "running", False)
            for b in sorted(metadata.brokers.values(), key=lambda b: b.id)
        ]
        return pd.DataFrame(
            rows, columns=["node", "roles", "address", "state", "active_controller"]
        )

    def _topics(self, metadata: Any, internal: bool) -> pd.DataFrame:
        rows: list[Any] = [
            (
                topic.topic,
                p.id,
                p.leader if p.leader in metadata.brokers else None,
                list(p.replicas),
                sorted(p.isrs),
            )
            for topic in metadata.topics.values()
            for p in topic.partitions.values()
            if internal or not topic.topic.startswith("__")
        ]
        rows.sort(key=lambda row: row[:2])
        table = pd.DataFrame(rows, columns=["topic", "partition", "leader", "replicas", "isr"])
        table["leader"] = table["leader"].astype("Int64")
        answering = self._answering(metadata)
        reachable = [
            (topic, partition) for topic, partition, leader, *_ in rows if leader in answering
        ]
        for column, spec in (("start", OffsetSpec.earliest()), ("end", OffsetSpec.latest())):
            offsets = self._offsets(reachable, spec)
            table[column] = pd.array([offsets.get(row[:2]) for row in rows], dtype="Int64")
        return table

    def _answering(self, metadata: Any) -> set[int]:
        return set(metadata.brokers)

    def _offsets(
        self, partitions: list[tuple[str, int]], spec: OffsetSpec
    ) -> dict[tuple[str, int], int]:
        if not partitions:
            return {}
        asked = {TopicPartition(*partition): spec for partition in partitions}
        futures = self._admin().list_offsets(asked, request_timeout=ANSWER_WITHIN)
        found = {}
        for partition, future in futures.items():
            with suppress(KafkaException):
                found[partition.topic, partition.partition] = future.result().offset
        return found


def _ids(ids: Any) -> str:
    return ", ".join(str(i) for i in sorted(ids))


def _names(table: pd.DataFrame) -> str:
    names = [f"{row.topic}-{row.partition}" for row in table.head(5).itertuples()]
    return ", ".join(names) + (" …" if len(table) > 5 else "")
