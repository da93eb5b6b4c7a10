"""Which nodes a cluster has, where they listen, and the files each one starts from."""

from __future__ import annotations

import base64
import json
import os
import random
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from labkit.errors import LabError

MOST_BROKERS = 9  # a broker takes some 200 MB; more teach nothing that nine do not
FIRST_CONTROLLER = 101  # ids of controllers that are no brokers
PORTS = range(
    21000, 32000
)  # below the ports that systems hand out to clients: a restart finds its own free

# Where Kafka's defaults are made for data centres, ours are made for a lesson on a laptop.
TEACHING = {
    "auto.create.topics.enable": "false",  # a mistyped name is an error, not a new topic
    "broker.heartbeat.interval.ms": "100",
    "broker.session.timeout.ms": "1000",  # a dead leader is replaced in about a second
    "controller.quorum.election.backoff.max.ms": "100",
    "controller.quorum.election.timeout.ms": "300",
    "controller.quorum.fetch.timeout.ms": "1000",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1000",
    "group.consumer.heartbeat.interval.ms": "300",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": "3000",
    "group.share.heartbeat.interval.ms": "300",
    "group.share.min.heartbeat.interval.ms": "100",
    "group.share.min.session.timeout.ms": "1000",
    "group.share.session.timeout.ms": "3000",
    "group.share.min.record.lock.duration.ms": "1000",
    "log.cleaner.dedupe.buffer.size": "4194304",  # 126 MB less memory for each broker
    "log.segment.delete.delay.ms": "1000",
    "num.io.threads": "4",
    "num.network.threads": "2",
    "offsets.topic.num.partitions": "5",
    "replica.lag.time.max.ms": "3000",
    "share.coordinator.state.topic.num.partitions": "3",
    "transaction.state.log.num.partitions": "3",
}

# What `kafka-storage format` writes for 4.3: groups, share groups and transactions are on.
BOOTSTRAP_CHECKPOINT = base64.b64decode(
    "AAAAAAAAAAAAAABHAAAAAAJkdUflACAAAAAAAAABoe58rFgAAAGh7nysWP//////////////////AAAAASoAAAAI"
    "AAAAAxYAAAAAAAAAAAAAAAAAAAAAAAAAAQAAAPEAAAAAAh3IjRYAAAAAAAUAAAGh7nyscwAAAaHufKxz////////"
    "//////////8AAAAGOgAAAAEuAQwAEW1ldGFkYXRhLnZlcnNpb24AHgAAWgAAAgFOAQwAIWVsaWdpYmxlLmxlYWRl"
    "ci5yZXBsaWNhcy52ZXJzaW9uAAEAADQAAAQBKAEMAA5ncm91cC52ZXJzaW9uAAEAADQAAAYBKAEMAA5zaGFyZS52"
    "ZXJzaW9uAAEAADgAAAgBLAEMABBzdHJlYW1zLnZlcnNpb24AAQAAQAAACgE0AQwAFHRyYW5zYWN0aW9uLnZlcnNp"
    "b24AAgAAAAAAAAAAAAcAAAA/AAAAAAIjyjF1ACAAAAAAAAABoe58rHQAAAGh7nysdP//////////////////AAAA"
    "ARoAAAAIAAAABAYAAAAA"
)


@dataclass(frozen=True)
class Node:
    """One process of the cluster."""

    id: int
    roles: tuple[str, ...]
    port: int  # for clients; 0 if the node is no broker
    controller_port: int  # 0 if the node is no controller

    @property
    def is_broker(self) -> bool:
        return "broker" in self.roles

    @property
    def is_controller(self) -> bool:
        return "controller" in self.roles

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}" if self.port else ""


def plan(brokers: Any, controllers: Any, port: Any) -> list[Node]:
    """Plan the nodes: the first one or three brokers are controllers too, unless told."""
    _check_count("brokers", brokers, MOST_BROKERS)
    if controllers is None:
        separate = 1 if brokers == 2 else 0  # a quorum of two would not survive the loss of one
    else:
        _check_count("controllers", controllers, 5)
        if controllers % 2 == 0:
            raise LabError(
                f"controllers={controllers} survives no more losses than {controllers - 1} do",
                "give an odd number: 1, 3 or 5",
            )
        separate = controllers
    combined = 0 if separate else (3 if brokers >= 3 else 1)
    client_ports = fixed_ports(port, brokers) if port is not None else free_ports(brokers)
    controller_ports = free_ports(combined + separate, avoid=client_ports)
    nodes = []
    for i in range(brokers):
        both = i < combined
        nodes.append(
            Node(
                i + 1,
                ("broker", "controller") if both else ("broker",),
                client_ports[i],
                controller_ports[i] if both else 0,
            )
        )
    for i in range(separate):
        nodes.append(Node(FIRST_CONTROLLER + i, ("controller",), 0, controller_ports[i]))
    return nodes


def _check_count(name: str, value: Any, most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise LabError(
            f"{name}={value!r} is not a number of {name}",
            f"give a whole number from 1 to {most}, for example {name}=3",
        )


def free_ports(count: int, avoid: list[int] | None = None) -> list[int]:
    """Return ports of 127.0.0.1 that nobody listens on."""
    found: list[int] = []
    for port in random.SystemRandom().sample(PORTS, 500):
        if len(found) == count:
            break
        if port not in (avoid or []) and _is_free(port):
            found.append(port)
    return found


def fixed_ports(first: Any, count: int) -> list[int]:
    """Return the ports from the first on, or say who has one of them."""
    if not isinstance(first, int) or not 1024 <= first <= 65535 - count:
        raise LabError(
            f"port={first!r} is not a port that a broker can have",
            "give a number from 1024 to 65000, or leave out port= to use free ones",
        )
    for port in range(first, first + count):
        if not _is_free(port):
            raise LabError(
                f"port {port} is taken{_owner(port)}",
                "stop it, or leave out port= to use free ones",
            )
    return list(range(first, first + count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Java does
        try:
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
        except OSError:
            return False
    return True


def _owner(port: int) -> str:
    try:
        for found in psutil.net_connections("tcp"):
            if found.status == psutil.CONN_LISTEN and found.pid and port in found.laddr:
                return f" by pid {found.pid} ({psutil.Process(found.pid).name()})"
    except psutil.Error:
        pass  # a Mac tells this to root only
    return ""


def settings(node: Node, nodes: list[Node], config: dict[str, str]) -> dict[str, str]:
    """Return a node's configuration: ours for teaching, then the caller's, then what must be."""
    copies = str(min(3, sum(n.is_broker for n in nodes)))
    listeners = []
    if node.is_broker:
        listeners.append(f"CLIENT://{node.address}")
    if node.is_controller:
        listeners.append(f"CONTROLLER://127.0.0.1:{node.controller_port}")
    voters = [f"{n.id}@127.0.0.1:{n.controller_port}" for n in nodes if n.is_controller]
    ours = {
        "process.roles": ",".join(node.roles),
        "node.id": str(node.id),
        "listeners": ",".join(listeners),
        "listener.security.protocol.map": "CLIENT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "controller.listener.names": "CONTROLLER",
        "controller.quorum.voters": ",".join(voters),
    } | ({"inter.broker.listener.name": "CLIENT"} if node.is_broker else {})
    for key in config:
        if key in ours or key in ("log.dir", "log.dirs"):
            raise LabError(f"config= cannot set {key!r}: labkit does that itself", "leave it out")
    return (
        TEACHING
        | {
            "default.replication.factor": copies,
            "offsets.topic.replication.factor": copies,
            "share.coordinator.state.topic.replication.factor": copies,
            "share.coordinator.state.topic.min.isr": "1",
            "transaction.state.log.replication.factor": copies,
            "transaction.state.log.min.isr": "1",
        }
        | config
        | ours
    )


def write_node(
    folder: Path, node: Node, nodes: list[Node], cluster_id: str, config: dict[str, str]
) -> str:
    """Write what a node starts from, as `kafka-storage format` would; return the file."""
    data = folder / f"node-{node.id}"
    data.mkdir(parents=True)
    directory_id = base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=")
    (data / "meta.properties").write_text(
        f"version=1\ncluster.id={cluster_id}\nnode.id={node.id}\ndirectory.id={directory_id}\n"
    )
    (data / "bootstrap.checkpoint").write_bytes(BOOTSTRAP_CHECKPOINT)
    lines = settings(node, nodes, config) | {"log.dirs": str(data)}
    file = folder / f"node-{node.id}.properties"
    file.write_text("".join(f"{key}={_escape(value)}\n" for key, value in lines.items()))
    return str(file)


def _escape(value: str) -> str:
    # Java reads the file as Latin-1, and a folder may be called jürgen: JSON's escapes are Java's.
    return json.dumps(value)[1:-1]
