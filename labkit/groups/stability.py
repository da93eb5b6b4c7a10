"""Whether a group has come to rest: what its coordinator says, and whether its members agree."""

from __future__ import annotations

import re
from typing import Any

from confluent_kafka import KafkaException

from labkit.cluster.cluster import Cluster
from labkit.groups.heard import Heard, Partition


def describe(cluster: Cluster, group: str) -> Any:
    """Return what the coordinator says of a group, or None if it knows of none."""
    try:
        futures = cluster._admin().describe_consumer_groups([group], request_timeout=5)
        return futures[group].result()
    except KafkaException:
        return None


def owners_of(described: Any) -> dict[Partition, str]:
    """Return who owns each partition, by the coordinator."""
    members = described.members if described else []
    return {p: member.client_id for member in members for p in _set(member.assignment)}


def unrest(
    described: Any, group: str, running: list[str], heard: Heard, partitions: set[Partition]
) -> str:
    """Say what is still missing for a group to be stable, or nothing."""
    trouble = "".join(f" ({name}: {text})" for name, text in heard.trouble.items())
    if described is None:
        return f"{group!r} is not known to a coordinator yet{trouble}"
    # Only ours are counted: a consumer of a cell's may take part as well.
    ours = re.compile(rf"{re.escape(group)}-\d+")
    members = [m for m in described.members if ours.fullmatch(m.client_id)]
    clients = sorted(m.client_id for m in members)
    if missing := sorted(set(running) - set(clients)):
        return f"{group!r} waits for {', '.join(missing)} to join{trouble}"
    if clients != sorted(running):
        gone = ", ".join(sorted(set(clients) - set(running))) or "an earlier member"
        return f"{group!r} still counts on {gone}, until its session is over"
    if described.state.name != "STABLE":
        return f"{group!r} is in state {described.state.name}{trouble}"
    for m in described.members:
        if m.target_assignment and _set(m.assignment) != _set(m.target_assignment):
            return f"{group!r} has not handed over to {m.client_id} all that it shall own"
    if unowned := sorted(partitions - set(owners_of(described))):
        return f"{group!r} has no owner for {', '.join(f'{t}-{p}' for t, p in unowned)}"
    for m in members:
        if heard.owned[m.client_id] != _set(m.assignment):
            return f"{m.client_id} has not reported that it owns what is assigned to it{trouble}"
    return ""


def _set(assignment: Any) -> set[Partition]:
    return {(p.topic, p.partition) for p in assignment.topic_partitions}
