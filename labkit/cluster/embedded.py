"""A cluster of real broker processes on this machine, to be started, broken and healed."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
from confluent_kafka.admin import AdminClient, ConfigResource

from labkit import aot, runtime
from labkit.cluster import complaints, tools
from labkit.cluster.cluster import Cluster
from labkit.cluster.lease import Lease
from labkit.cluster.plan import Node, free_ports, write_node
from labkit.cluster.tools import Text
from labkit.errors import LabError
from labkit.progress import Progress

START_WITHIN = 60.0  # seconds; a loaded two-core machine takes ten
HEAP = "256m"


class EmbeddedCluster(Cluster):
    """A lab's cluster: the same views as any, and its processes and files within reach."""

    def __init__(self, lease: Lease, name: str) -> None:
        self.name = name
        self._lease = lease
        self._asked: set[int] = set()  # the brokers that our client was made to ask
        self._nodes_by_id = {
            n["id"]: Node(n["id"], tuple(n["roles"]), n["port"], n["controller_port"])
            for n in lease.ask("status")["meta"]["nodes"]
        }
        super().__init__(self._addresses())
        self._folder = lease.folder

    def _addresses(self) -> str:
        return ",".join(n.address for n in self._nodes_by_id.values() if n.is_broker)

    def _living_addresses(self) -> str:
        living = self._answering(None)
        found = [n.address for n in self._nodes_by_id.values() if n.is_broker and n.id in living]
        return ",".join(found) or self._bootstrap

    # --- what there is ----------------------------------------------------------------------------

    @property
    def brokers(self) -> list[int]:
        """The ids of the brokers, dead ones too."""
        self._check_open()
        return [node.id for node in self._nodes_by_id.values() if node.is_broker]

    def nodes(self) -> pd.DataFrame:
        """Return a table of the nodes: node, roles, address, state, active_controller."""
        self._check_open()
        return self._nodes(None)

    def segments(
        self, topic: str, partition: int | None = None, broker: int | None = None
    ) -> pd.DataFrame:
        """Return what is in a topic's files, one row a record, as kafka-dump-log reads them.

        Without ``broker`` each partition is read where its leader keeps it.
        """
        self._check_open()
        table = self.topics(internal=True)
        table = table[table.topic == topic]
        if table.empty:
            raise self._unknown_topic(topic)
        if partition is not None:
            table = table[table.partition == partition]
            if table.empty:
                raise LabError(
                    f"topic {topic!r} has no partition {partition!r}",
                    "cluster.topics() lists the partitions",
                )
        files: list[Path] = []
        for number, leader, replicas in zip(table.partition, table.leader, table.replicas):
            home = replicas[0] if pd.isna(leader) else int(leader)
            holder = self._node(home if broker is None else broker)
            files += sorted((self._data(holder) / f"{topic}-{number}").glob("*.log"))
        return tools.segments(files)

    def log(self, broker: int, lines: int = 40) -> Text:
        """Return the last lines of a broker's own log."""
        return Text("\n".join(self._log(self._node(broker)).splitlines()[-lines:]))

    def run(self, command: str, input: str | None = None, timeout: float = 60.0) -> Text:
        """Run one of Kafka's command-line tools, with the bootstrap server filled in."""
        self._check_open()
        if not self._has_majority():
            timeout = min(timeout, 10.0)  # many commands would wait a minute for a controller
        try:
            return tools.run_tool(command, self._living_addresses(), input, timeout)
        except LabError as error:
            if "still running" in error.what and not self._has_majority():
                raise self._no_majority(error.what) from None
            raise

    # --- breaking it ------------------------------------------------------------------------------

    def kill(self, broker: int) -> None:
        """End a broker as a power cut would (SIGKILL)."""
        self._signal(broker, signal.SIGKILL, "kill", ("running", "frozen"))

    def stop(self, broker: int) -> None:
        """Shut a broker down politely (SIGTERM): it hands its leaderships over first."""
        self._signal(broker, signal.SIGTERM, "stop", ("running",))
        with Progress(f"Stopping broker {broker}"):
            # Without a majority of controllers a polite shutdown would wait for ever.
            deadline = time.monotonic() + (10.0 if self._has_majority(without=broker) else 1.0)
            while self._state(broker) != "dead":
                if time.monotonic() > deadline:
                    self._lease.ask("signal", name=_process(broker), number=signal.SIGKILL)
                time.sleep(0.02)

    def freeze(self, broker: int) -> None:
        """Stop a broker in its tracks (SIGSTOP): it is there and does not answer."""
        self._signal(broker, signal.SIGSTOP, "freeze", ("running",))

    def thaw(self, broker: int) -> None:
        """Let a frozen broker go on (SIGCONT)."""
        self._signal(broker, signal.SIGCONT, "thaw", ("frozen",))

    def restart(self, broker: int) -> None:
        """Start a broker again on its port and its data, stopping it first if it runs."""
        node = self._node(broker)
        if self._state(broker) == "running":
            self.stop(broker)
        elif self._state(broker) == "frozen":
            self.kill(broker)
        with Progress(f"Restarting broker {broker}") as progress:
            self._spawn(node)
            self._wait_until_up([node], progress)

    def add_broker(self) -> int:
        """Add an empty broker and return its id."""
        self._check_open()
        if not self._has_majority():
            raise self._no_majority("no broker can join")
        meta = self._lease.ask("status")["meta"]
        node = Node(max(self.brokers) + 1, ("broker",), free_ports(1)[0], 0)
        nodes = [*self._nodes_by_id.values(), node]
        with Progress(f"Adding broker {node.id}") as progress:
            self._nodes_by_id[node.id] = node
            try:
                with runtime.writing(self._lease.folder):
                    config = meta["settings"]["config"]
                    write_node(self._lease.folder, node, nodes, meta["cluster_id"], config)
                self._spawn(node)
                self._wait_until_up([node], progress)
            except BaseException:
                del self._nodes_by_id[node.id]
                with suppress(LabError):  # it may not even have been spawned
                    self._lease.ask("signal", name=_process(node.id), number=signal.SIGKILL)
                shutil.rmtree(self._data(node), ignore_errors=True)
                raise
        self._lease.ask("set", nodes=[asdict(n) for n in nodes])
        self._bootstrap = self._addresses()
        return node.id

    # --- starting and healing ---------------------------------------------------------------------

    def start_all(self) -> None:
        """Start what is dead, thaw what is frozen, and wait until every node is up."""
        with Progress(f"Starting {self._name()}") as progress:
            for node in self._nodes_by_id.values():
                state = self._state(node.id)
                if state == "frozen":
                    self.thaw(node.id)
                elif state == "dead":
                    self._spawn(node)
            self._wait_until_up(list(self._nodes_by_id.values()), progress)

    def _spawn(self, node: Node) -> None:
        properties, log = f"{self._data(node)}.properties", self._log_file(node)
        log.unlink(missing_ok=True)  # the log of this life, not of the last
        # Elsewhere, the libraries that it unpacks would outlive a killed broker.
        flags = [*aot.flags("broker"), f"-Djava.io.tmpdir={self._lease.folder}"]
        argv = runtime.jvm(HEAP, flags, "kafka.Kafka", properties)
        self._lease.ask(
            "spawn", name=_process(node.id), argv=argv, log=str(log), cwd=str(self._lease.folder)
        )

    def _wait_until_up(self, begun: list[Node], progress: Progress) -> None:
        deadline = time.monotonic() + (START_WITHIN if self._has_majority() else 3.0)
        retried: set[int] = set()
        waiting = {node.id: node for node in begun}
        while waiting:
            progress.step(f"{len(begun) - len(waiting)} of {len(begun)} up")
            status = self._lease.ask("status")["processes"]
            for node in list(waiting.values()):
                if status[_process(node.id)]["state"] == "dead":
                    spoke = " ERROR " in self._log(node)  # then Kafka itself gave up, not the JVM
                    if spoke or node.id in retried or not aot.flags("broker"):
                        raise complaints.died(node.id, self._log(node), self._lease.folder)
                    retried.add(node.id)  # never let a cache be the reason
                    aot.forget()
                    self._spawn(node)
                elif self._is_up(node):
                    del waiting[node.id]
            if waiting and time.monotonic() > deadline:
                raise self._not_up(waiting)
            if waiting:
                time.sleep(0.02)
        self._check_registered(begun, deadline)

    def _is_up(self, node: Node) -> bool:
        # A broker opens its port for clients once the controller has let it in.
        with socket.socket() as probe:
            probe.settimeout(0.5)
            return probe.connect_ex(("127.0.0.1", node.port or node.controller_port)) == 0

    def _check_registered(self, begun: list[Node], deadline: float) -> None:
        wanted = {node.id for node in begun if node.is_broker}
        while not wanted <= set(self._metadata().brokers):
            if time.monotonic() > deadline:
                raise self._not_up({node.id: node for node in begun})
            time.sleep(0.02)

    def _not_up(self, waiting: dict[int, Node]) -> LabError:
        ids = ", ".join(map(str, waiting))
        if not self._has_majority():
            return self._no_majority(f"broker {ids} cannot join")
        return LabError(
            f"node {ids} was not up after {START_WITHIN:.0f} s",
            "see cluster.log(...) of it; a machine under load may need labkit.start() again",
        )

    def _no_majority(self, what: str) -> LabError:
        controllers = {n.id for n in self._nodes_by_id.values() if n.is_controller}
        gone = ", ".join(map(str, sorted(controllers - self._answering(None))))
        return LabError(
            f"{what}; most controllers are gone ({gone})",
            "labkit.start() brings them back, or cluster.restart(...) one by one",
        )

    def _train(self, *kinds: str) -> None:
        if aot.missing(*kinds):
            folder = str(self._lease.folder)
            argv = [sys.executable, "-m", "labkit.aot", *kinds]
            with suppress(LabError):  # it may be at it already
                self._lease.ask(
                    "spawn",
                    name=f"aot {kinds}",
                    argv=argv,
                    nice=10,
                    log=f"{folder}/aot.log",
                    cwd=folder,
                )

    def check_config(self, config: dict[str, str]) -> None:
        """Refuse names that the broker does not know."""
        if config:
            resource = ConfigResource(ConfigResource.Type.BROKER, str(self.brokers[0]))
            future = self._admin().describe_configs([resource], request_timeout=10)[resource]
            complaints.refuse_unknown(config, future.result().values())

    # --- processes and files ----------------------------------------------------------------------

    def _node(self, broker: Any) -> Node:
        self._check_open()
        if type(broker) is not int or broker not in self._nodes_by_id:
            raise LabError(
                f"there is no broker {broker!r}",
                f"this cluster has: {', '.join(map(str, self._nodes_by_id))}",
            )
        return self._nodes_by_id[broker]

    def _state(self, node: int) -> str:
        return self._states()[node]

    def _states(self) -> dict[int, str]:
        processes = self._lease.ask("status")["processes"]
        return {
            node: processes.get(_process(node), {"state": "dead"})["state"]
            for node in self._nodes_by_id
        }

    def _answering(self, metadata: Any) -> set[int]:
        return {node for node, state in self._states().items() if state == "running"}

    def _admin(self) -> AdminClient:
        # A client that has a frozen broker's connection may ask just that one, and wait.
        answering = self._answering(None)
        if answering != self._asked:
            self._drop_admin()
            self._client["bootstrap.servers"] = self._living_addresses()
            self._asked = answering
        return super()._admin()

    def _metadata(self) -> Any:
        states = self._states()
        if not any(states[broker] == "running" for broker in self.brokers):
            told = ", ".join(f"{broker} {states[broker]}" for broker in self.brokers)
            raise LabError(f"no broker is running: {told}", "labkit.start() brings them back")
        try:
            return super()._metadata()
        except LabError as error:
            raise error if self._has_majority() else self._no_majority(error.what) from None

    def _signal(self, broker: int, number: int, verb: str, allowed: tuple[str, ...]) -> None:
        self._node(broker)
        state = self._state(broker)
        if state not in allowed:
            to_do = {
                "dead": f"cluster.restart({broker}) brings it back",
                "frozen": f"cluster.thaw({broker}) lets it go on",
                "running": "it is running as it should",
            }[state]
            raise LabError(f"cannot {verb} broker {broker}: it is {state}", to_do)
        self._lease.ask("signal", name=_process(broker), number=number)

    def _has_majority(self, without: int | None = None) -> bool:
        controllers = {n.id for n in self._nodes_by_id.values() if n.is_controller}
        alive = controllers & self._answering(None) - {without}
        return len(alive) * 2 > len(controllers)

    def _data(self, node: Node) -> Path:
        return self._lease.folder / f"node-{node.id}"

    def _log_file(self, node: Node) -> Path:
        return self._lease.folder / f"node-{node.id}.log"

    def _log(self, node: Node) -> str:
        try:
            return self._log_file(node).read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def _active_controller(self) -> int | None:
        # Each controller keeps the vote's outcome in a file: no need to ask one that may be stuck.
        best, answering = (-1, -1), self._answering(None)
        for node in self._nodes_by_id.values():
            if node.is_controller and node.id in answering:
                file = self._data(node) / "__cluster_metadata-0" / "quorum-state"
                try:
                    state = json.loads(file.read_text())
                except (OSError, ValueError):
                    continue
                best = max(best, (int(state["leaderEpoch"]), int(state["leaderId"])))
        return best[1] if best[1] in answering and self._has_majority() else None

    def _nodes(self, metadata: Any) -> pd.DataFrame:
        active, states = self._active_controller(), self._states()
        rows = [
            (node.id, ", ".join(node.roles), node.address, states[node.id], node.id == active)
            for node in self._nodes_by_id.values()
        ]
        columns = ["node", "roles", "address", "state", "active_controller"]
        return pd.DataFrame(rows, columns=columns)

    def _name(self) -> str:
        return f"Kafka cluster {self.name!r}"

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the cluster and remove its data; if another process holds it too, only let go."""
        if self._closed:
            return
        super().close()
        try:
            if self._lease.others():
                for group in self._groups.values():
                    group.close()
                return self._lease.release()
        except LabError:
            return  # gone already
        self._lease.end()


def _process(node: int) -> str:
    return f"node-{node}"
