"""Start and break brokers: embedded processes and their guard, or a cluster that exists."""

from __future__ import annotations

import base64
import os
import re
import socket
import ssl
from dataclasses import asdict
from typing import Any

from labkit import runtime
from labkit.cluster import lease as leases
from labkit.cluster.cluster import Cluster
from labkit.cluster.embedded import EmbeddedCluster
from labkit.cluster.lease import Lease
from labkit.cluster.plan import plan, write_node
from labkit.errors import LabError, nearest

__all__ = ["Cluster", "EmbeddedCluster", "connect", "start"]

_DEFAULTS: dict[str, Any] = {"brokers": 3, "controllers": None, "port": None, "config": {}}
_held: dict[str, EmbeddedCluster] = {}  # this process's clusters, by name and workspace


def start(
    brokers: int | None = None,
    *,
    controllers: int | None = None,
    port: int | None = None,
    config: dict[str, Any] | None = None,
    fresh: bool = False,
    name: str = "lab",
) -> EmbeddedCluster:
    """Give a healthy cluster: the running one if it fits what is asked for, else a new one.

    ``brokers``: how many, 3 unless said. ``controllers``: so many of their own, so that any
    broker may die.
    ``port``: the first broker's, free ones unless said. ``config``: settings for every broker.
    ``fresh``: an empty cluster in place of the running one. ``name``: one beside the others.
    """
    asked = {
        "brokers": brokers,
        "controllers": controllers,
        "port": port,
        "config": _strings(config),
    }
    asked = {key: value for key, value in asked.items() if value is not None}
    wanted = _DEFAULTS | asked
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.]{1,30}", name):
        raise LabError(
            f"name={name!r} is not a name for a cluster",
            'give 1 to 30 letters, digits, dots or underscores, for example name="second"',
        )
    plan(wanted["brokers"], wanted["controllers"], None)  # refuse bad numbers before all else
    runtime.jars()
    runtime.make_folder(leases.labs())
    folder = leases.lab_folder(name)
    lock = leases.labs() / "lock"
    with runtime.writing(folder), runtime.locked(lock, "starting a cluster", timeout=120):
        leases.sweep()
        cluster = _running(folder, name)
        if cluster is not None:
            settings = cluster._lease.ask("status")["meta"]["settings"]
            fits = all(settings[key] == value for key, value in asked.items())
            if fits and not fresh:
                cluster.start_all()
                return cluster
            others = cluster._lease.others()
            if others:
                if str(folder) not in _held:
                    cluster._lease.release()
                raise LabError(
                    f"the cluster {name!r} is in use by {', '.join(others)}",
                    "close that notebook (or end that process), or start another beside it: "
                    'labkit.start(name="second")',
                )
            cluster.close()
            _held.pop(str(folder), None)
        lease = leases.launch(folder)
        try:
            cluster = _held[str(folder)] = _create(lease, name, wanted)
        except BaseException:
            lease.end()
            raise
    return cluster


def _create(lease: Lease, name: str, wanted: dict[str, Any]) -> EmbeddedCluster:
    """Make a new cluster in a lab that has just been launched."""
    nodes = plan(wanted["brokers"], wanted["controllers"], wanted["port"])
    cluster_id = base64.urlsafe_b64encode(os.urandom(16)).decode().rstrip("=")
    for node in nodes:
        write_node(lease.folder, node, nodes, cluster_id, wanted["config"])
    lease.ask(
        "set",
        name=name,
        workspace=str(runtime.workspace()),
        cluster_id=cluster_id,
        settings=wanted,
        nodes=[asdict(node) for node in nodes],
        pid=os.getpid(),
    )
    cluster = EmbeddedCluster(lease, name)
    cluster.start_all()
    cluster.check_config(wanted["config"])
    cluster._train()
    return cluster


def _running(folder: Any, name: str) -> EmbeddedCluster | None:
    ours = _held.get(str(folder))
    if ours is not None and not ours._closed:
        try:
            ours._lease.ask("status")
            return ours
        except LabError:
            ours._closed = True  # its guard was killed
    lease = leases.attach(folder)
    if lease is None:
        return None
    lease.hold()
    if "nodes" not in lease.ask("status")["meta"]:
        lease.end()  # its maker was killed before the cluster was planned
        return None
    cluster = _held[str(folder)] = EmbeddedCluster(lease, name)
    return cluster


def _strings(config: dict[str, Any] | None) -> dict[str, str] | None:
    if config is None:
        return None
    if not isinstance(config, dict):
        raise LabError(
            f"config={config!r} is not a dictionary",
            'give names and values, for example config={"log.retention.ms": 60000}',
        )
    plain = {True: "true", False: "false"}
    return {
        str(key): plain[value] if isinstance(value, bool) else str(value)
        for key, value in config.items()
    }


# kafka-python's names, which the notebooks use, and what the C client calls them.
_SECURITY = {
    "security_protocol": "security.protocol",
    "sasl_mechanism": "sasl.mechanism",
    "sasl_plain_username": "sasl.username",
    "sasl_plain_password": "sasl.password",
    "ssl_cafile": "ssl.ca.location",
    "ssl_certfile": "ssl.certificate.location",
    "ssl_keyfile": "ssl.key.location",
    "ssl_password": "ssl.key.password",
}


def connect(bootstrap: str, **security: Any) -> Cluster:
    """Look at a cluster that exists; security settings are named as in kafka-python."""
    for key in security:
        if key not in _SECURITY:
            raise LabError(
                f"connect() takes no {key!r}{nearest(key, _SECURITY)}",
                f"it takes: {', '.join(_SECURITY)}",
            )
    addresses = [_address(text) for text in str(bootstrap).split(",")]
    if security.get("security_protocol", "PLAINTEXT") in ("PLAINTEXT", "SASL_PLAINTEXT"):
        _probe(addresses)
    cluster = Cluster(bootstrap, {_SECURITY[key]: value for key, value in security.items()})
    cluster._metadata()  # fail here, where the address was given
    return cluster


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.strip().rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise LabError(f"{text!r} is not an address", "give host:port, for example localhost:9092")
    return host.strip("[]"), int(port)


def _probe(addresses: list[tuple[str, int]]) -> None:
    """Say at once what is wrong with an address that no Kafka client would get an answer from."""
    problems = []
    for host, port in addresses:
        problem = _what_is_wrong(host, port)
        if problem is None:
            return
        problems.append(f"{host}:{port}: {problem}")
    raise LabError(
        f"cannot connect to {'; '.join(problems)}",
        'give security_protocol="SSL" and ssl_cafile="its certificate authority\'s file.pem"'
        if any("TLS" in problem for problem in problems)
        else "check the address, and that a Kafka broker runs there",
    )


def _what_is_wrong(host: str, port: int) -> str | None:
    # ApiVersions, version 0: what every broker answers, logged in or not.
    request = bytes.fromhex("0000000f 0012 0000 00000001 0005") + b"probe"
    try:
        with socket.create_connection((host, port), timeout=4) as connection:
            connection.settimeout(4)
            connection.sendall(request)
            answer = connection.recv(8)
    except ConnectionRefusedError:
        return "nothing listens there"
    except TimeoutError:
        return "it does not answer as Kafka does"
    except ConnectionError:
        answer = b""
    except (OSError, UnicodeError) as error:
        return str(getattr(error, "strerror", None) or error)
    # After its length, an answer repeats the number of the request: 1.
    if answer[4:8] == b"\0\0\0\1":
        return None
    return "it speaks TLS" if _speaks_tls(host, port) else "it does not answer as Kafka does"


def _speaks_tls(host: str, port: int) -> bool:
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # only: is it TLS at all?
    try:
        with socket.create_connection((host, port), timeout=4) as connection:
            context.wrap_socket(connection).close()
    except ssl.SSLError as error:
        return "ALERT" in str(error.reason)  # as where it wants a certificate of ours
    except OSError:
        return False
    return True
