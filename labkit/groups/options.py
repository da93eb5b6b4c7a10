"""What a group can be asked for: each option checked, and the members' settings made from them."""

from __future__ import annotations

import math
import re
import time
from typing import Any

from confluent_kafka import Consumer, KafkaException

from labkit.cluster.cluster import KNOWN_WITHIN, Cluster
from labkit.errors import LabError, nearest

MOST_MEMBERS = 50  # a member takes some 30 MB; more teach nothing that fifty do not
ASSIGNORS = {  # the first is what you get unless you say
    "classic": ["range", "roundrobin", "cooperative-sticky"],
    "consumer": ["uniform", "range"],
}
COMMITS = ["after", "before", "auto"]
OPTIONS = ["assignor", "protocol", "static", "work_ms", "commit", "config"]


def settings(
    bootstrap: str, name: str, protocol: str, assignor: str, commit: str, config: dict[str, Any]
) -> dict[str, Any]:
    """Return the settings of every member's client, and refuse those that it would refuse."""
    classic = {
        "partition.assignment.strategy": assignor,
        "session.timeout.ms": 3000,
        "heartbeat.interval.ms": 300,
    }
    server_side = {"group.protocol": "consumer", "group.remote.assignor": assignor}
    auto = {"enable.auto.commit": True, "auto.commit.interval.ms": 500}
    wanted = {
        "bootstrap.servers": bootstrap,
        "group.id": name,
        "auto.offset.reset": "earliest",
        "topic.metadata.refresh.interval.ms": 1000,  # added partitions are noticed soon
        "coordinator.query.interval.ms": 1000,
        "reconnect.backoff.ms": 50,
        "reconnect.backoff.max.ms": 500,
        "socket.timeout.ms": 6000,  # a frozen broker is given up before a learner does
        "log_level": 2,
    }
    wanted |= classic if protocol == "classic" else server_side
    wanted |= (auto if commit == "auto" else {"enable.auto.commit": False}) | config
    try:
        Consumer(wanted | {"bootstrap.servers": "", "log_level": 0}).close()  # it meets no broker
    except (KafkaException, TypeError, ValueError) as error:
        why = error.args[0].str() if isinstance(error, KafkaException) else error
        raise LabError(
            f"no member can start with config={config!r}: {why}",
            "see librdkafka's CONFIGURATION.md for the names and values that there are",
        ) from None
    return wanted


def choose(name: str, value: Any, known: list[str], where: str = "") -> None:
    """Refuse a value that is not one of the known words."""
    if value not in known:
        raise LabError(
            f"there is no {name}={value!r}{where}{nearest(str(value), known)}",
            f"use one of: {', '.join(known)}",
        )


def check(
    name: Any, protocol: Any, assignor: Any, static: Any, commit: Any, config: Any, unknown: Any
) -> None:
    """Refuse options that make no group."""
    for word in unknown:
        raise LabError(
            f"group() takes no {word!r}{nearest(word, OPTIONS)}",
            f"it takes a name, topics, members, and: {', '.join(OPTIONS)}",
        )
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,100}", name):
        raise LabError(
            f"{name!r} is not a name for a group",
            'give 1 to 100 letters, digits, dots, dashes or underscores, such as "shipping"',
        )
    choose("protocol", protocol, list(ASSIGNORS))
    if assignor is not None:
        choose("assignor", assignor, ASSIGNORS[protocol], f" with protocol={protocol!r}")
    choose("commit", commit, COMMITS)
    if not isinstance(static, bool):
        raise LabError(f"static={static!r} is neither True nor False", "give one of them")
    if config is not None and not isinstance(config, dict):
        raise LabError(
            f"config={config!r} is not a dictionary",
            'give names and values, for example config={"fetch.max.bytes": 1000}',
        )


def check_count(value: Any, living: int) -> None:
    """Refuse what is not a number of members to start, beside those that live."""
    most = MOST_MEMBERS - living
    if type(value) is not int or not 1 <= value <= most:
        beside = f" beside the {living} that there are" if living else ""
        raise LabError(
            f"{value!r} is not a number of members to start{beside}",
            f"give a whole number from 1 to {most}, for example 1" if most else "stop some first",
        )


def milliseconds(name: str, value: Any) -> float:
    """Return a time to work, if it is one."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value < 0:
        raise LabError(
            f"{name}={value!r} is not a time to work", f"give milliseconds, for example {name}=100"
        )
    return float(value)


def check_topics(cluster: Cluster, topics: Any) -> list[str]:
    """Return the topics as a list, if there are such topics."""
    names = [topics] if isinstance(topics, str) else topics
    if not isinstance(names, list) or not names:
        raise LabError(f"topics={topics!r} names no topic", 'give some, such as topics="orders"')
    deadline = time.monotonic() + KNOWN_WITHIN
    while missing := [name for name in names if name not in cluster._metadata().topics]:
        if time.monotonic() > deadline:
            raise cluster._unknown_topic(str(missing[0]))
        time.sleep(0.05)
    return names
