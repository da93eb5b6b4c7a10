"""What a group can be asked for: each value checked, and what it means to Kafka."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

from confluent_kafka import TopicPartition

from labkit.errors import LabError, nearest

Target = tuple[str, int, int | None, int]  # topic, partition, offset before, offset after

NAME = re.compile(r"[A-Za-z0-9_.-]{1,100}")
COMMITS = ["after", "before", "auto"]
ASSIGNORS = {  # the first is what you get unless you say
    "classic": ["range", "roundrobin", "cooperative-sticky"],
    "consumer": ["uniform", "range"],
}
SETTINGS = {  # of every member's client
    "auto.offset.reset": "earliest",
    "auto.commit.interval.ms": 500,
    "topic.metadata.refresh.interval.ms": 1000,  # added partitions are noticed soon
    "coordinator.query.interval.ms": 1000,
    "reconnect.backoff.ms": 50,
    "reconnect.backoff.max.ms": 500,
    "socket.timeout.ms": 6000,  # a frozen broker is given up before a learner does
    "log_level": 2,
}
CLASSIC = {"session.timeout.ms": 3000, "heartbeat.interval.ms": 300}
CHECKS: dict[str, tuple[Callable[[Any], Any], str]] = {  # what fits, and what to give
    "name": (lambda v: isinstance(v, str) and NAME.fullmatch(v), "letters, digits, dots, dashes"),
    "topics": (lambda v: isinstance(v, list) and v, 'one or a list, such as "orders"'),
    "members": (lambda v: type(v) is int and 1 <= v <= 50, "a whole number from 1 to 50"),
    "work_ms": (lambda v: isinstance(v, (int, float)) and v >= 0, "milliseconds, such as 100"),
    "owners": (lambda v: isinstance(v, dict) and v, 'partitions and members: {0: "shipping-1"}'),
    "by": (lambda v: type(v) is int, "a number of records, such as -100"),
    "at": (lambda v: isinstance(v, (int, float, datetime)), "a datetime, or seconds since 1970"),
}


def check(**given: Any) -> None:
    """Refuse a value that makes no sense."""
    for name, value in given.items():
        fits, wanted = CHECKS[name]
        if not fits(value):
            raise LabError(f"{name}={value!r} is not possible", f"give {wanted}")


def choose(name: str, value: Any, known: list[str]) -> None:
    """Refuse a value that is not one of the known words."""
    if value not in known:
        what = f"there is no {name}={value!r}{nearest(str(value), known)}"
        raise LabError(what, f"use one of: {', '.join(known)}")


def settings(protocol: str, assignor: str | None, commit: str) -> dict[str, Any]:
    """Return the settings of every member's client."""
    choose("protocol", protocol, list(ASSIGNORS))
    choose("commit", commit, COMMITS)
    assignor = assignor or ASSIGNORS[protocol][0]
    choose(f"protocol={protocol!r} with assignor", assignor, ASSIGNORS[protocol])
    if protocol == "classic":
        own = CLASSIC | {"partition.assignment.strategy": assignor}
    else:
        own = {"group.protocol": protocol, "group.remote.assignor": assignor}
    return SETTINGS | own | {"enable.auto.commit": commit == "auto"}


def place_to_reset_to(by: Any, to: Any, at: Any) -> dict[str, Any]:
    """Return the one that is given of the places that a reset can go to."""
    given = {name: v for name, v in [("by", by), ("to", to), ("at", at)] if v is not None}
    if len(given) != 1:
        what = f"reset() goes to one place, not to {given or 'none'}"
        raise LabError(what, 'give one of: by=-100, to="earliest", at=a datetime')
    if to is not None:
        choose("to", to, ["earliest", "latest"])
    else:
        check(**given)
    return given


def target(
    consumer: Any, topic: str, partition: int, by: int = 0, to: str = "", at: Any = None
) -> Target:
    """Return where a partition's committed offset is, and where it goes within the log."""
    (place,) = consumer.committed([TopicPartition(topic, partition)], 5)
    start, end = consumer.get_watermark_offsets(place, 5)
    before = place.offset if place.offset >= 0 else None
    if at is not None:
        place.offset = int(1000 * (at.timestamp() if isinstance(at, datetime) else at))
        (found,) = consumer.offsets_for_times([place], 5)
        after = found.offset if found.offset >= 0 else end
    elif to:
        after = start if to == "earliest" else end
    else:
        after = (start if before is None else before) + by
    return topic, partition, before, min(max(after, start), end)
