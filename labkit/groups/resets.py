"""Where a reset moves a group's committed offsets to."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import confluent_kafka
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec

from labkit.cluster.cluster import Cluster
from labkit.errors import LabError
from labkit.groups.heard import Partition
from labkit.groups.options import choose

Offsets = dict[Partition, int]


def check(by: Any, to: Any, at: Any) -> None:
    """Refuse a reset that does not say where to."""
    given = {"by": by, "to": to, "at": at}
    said = [f"{key}={value!r}" for key, value in given.items() if value is not None]
    if len(said) != 1:
        raise LabError(
            f"reset({', '.join(said)}) says {'more than one place' if said else 'not where to'}",
            'give one of: by=-100, to="earliest", to={0: 17}, at=a datetime',
        )
    if by is not None and type(by) is not int:
        raise LabError(f"by={by!r} is not a number of records", "give one, such as by=-100")
    if at is not None and (isinstance(at, bool) or not isinstance(at, (int, float, datetime))):
        raise LabError(f"at={at!r} is not a time", "give a datetime, or seconds since 1970")
    if isinstance(to, dict) and to:
        for offset in to.values():
            if type(offset) is not int:
                raise LabError(f"{offset!r} is not an offset", "give a number, such as {0: 17}")
    elif to is not None:
        choose("to", to, ["earliest", "latest"], ", nor offsets such as {0: 17}")


def targets(
    cluster: Cluster, partitions: list[Partition], before: Offsets, by: Any, to: Any, at: Any
) -> Offsets:
    """Return the offset that each partition is moved to, within what its log still has."""
    specs = OffsetSpec.earliest(), OffsetSpec.latest()
    start, end = (cluster._offsets(partitions, spec) for spec in specs)
    for partition in partitions:
        if partition not in start or partition not in end:
            raise LabError(
                f"nobody can tell the offsets of {partition[0]}-{partition[1]}: no leader answers",
                'cluster.wait_for("leaders") first',
            )
    if by is not None:
        wanted = {p: before.get(p, start[p]) + by for p in partitions}
    elif at is not None:
        seconds = at.timestamp() if isinstance(at, datetime) else at
        spec = OffsetSpec.for_timestamp(max(0, int(seconds * 1000)))
        found = cluster._offsets(partitions, spec)
        wanted = {p: found[p] if found.get(p, -1) >= 0 else end[p] for p in partitions}
    elif isinstance(to, dict):
        wanted = to
    else:
        wanted = start if to == "earliest" else end
    return {p: min(max(wanted[p], start[p]), end[p]) for p in partitions if p in wanted}


def committed(cluster: Cluster, group: str) -> Offsets:
    """Return the group's committed offsets."""
    asked = confluent_kafka.ConsumerGroupTopicPartitions(group)
    try:
        futures = cluster._admin().list_consumer_group_offsets([asked], request_timeout=10)
        found = futures[group].result().topic_partitions
    except KafkaException:
        return {}  # it has never committed
    return {(p.topic, p.partition): p.offset for p in found if p.offset >= 0}


def alter(cluster: Cluster, group: str, to: Offsets) -> str:
    """Set the committed offsets of a group without members; say why if that is refused."""
    partitions = [TopicPartition(*partition, offset) for partition, offset in to.items()]
    asked = confluent_kafka.ConsumerGroupTopicPartitions(group, partitions)
    try:
        futures = cluster._admin().alter_consumer_group_offsets([asked], request_timeout=10)
        errors = [p.error for p in futures[group].result().topic_partitions if p.error]
    except KafkaException as error:
        errors = [error.args[0]]
    return f"the offsets of {group!r} cannot be reset: {errors[0].str()}" if errors else ""
