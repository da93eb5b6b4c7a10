"""Samples of a cluster through its admin API: topics and their ids, and where each log ends."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from confluent_kafka import IsolationLevel, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import OffsetSpec

from labkit.watch.decode import batch_of
from labkit.watch.log import OFFSETS

if TYPE_CHECKING:
    from labkit.cluster.cluster import Cluster

ASK_WITHIN = 4.0  # seconds
IDS_EVERY = 2.0  # seconds: a topic that was deleted and made anew has another id


class Sampler:
    """Look at a cluster again and again, and tell what changed."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self.partitions: list[int] = []  # of the offsets topic, once there is one
        self._sizes: dict[str, int] = {}
        self._ids: dict[str, str] = {}
        self._asked = 0.0
        self._told: dict[Any, Any] = {}
        self._stable: dict[int, int] = {}  # the last stable offset of partitions that have to wait

    def sample(self, wanted: set[str]) -> pa.RecordBatch | None:
        """Return what changed since the last time, with offsets of the wanted topics only."""
        return batch_of(list(self._changes(wanted)))

    def _changes(self, wanted: set[str]) -> Iterator[dict[str, Any]]:
        metadata = self._cluster._metadata()  # a listing: unlike a question by name, it makes none
        at = int(time.time() * 1000)
        self.partitions = sorted(t.partitions) if (t := metadata.topics.get(OFFSETS)) else []
        sizes = {name: len(t.partitions) for name, t in metadata.topics.items()}
        sizes = {name: size for name, size in sizes.items() if not name.startswith("__")}
        if sizes != self._sizes or time.monotonic() - self._asked > IDS_EVERY:
            self._asked = time.monotonic()
            ids = self._topic_ids(list(sizes))
            for name in sizes:
                told = {"id": ids.get(name), "partitions": sizes[name]}
                if name in ids and self._told.get(name) != told:
                    self._told[name] = told
                    yield {"kind": "topic", "topic": name, "at": at, "detail": json.dumps(told)}
            for name in set(self._sizes) - set(sizes):
                self._told = {
                    key: told
                    for key, told in self._told.items()
                    if name != (key if isinstance(key, str) else key[0])
                }
                yield {"kind": "topic", "topic": name, "at": at}
            self._sizes = sizes
        places = [(t, p) for t in sorted(wanted & set(sizes)) for p in range(sizes[t])]
        starts = self._cluster._offsets(places, OffsetSpec.earliest())
        ends = self._cluster._offsets(places, OffsetSpec.latest())
        for topic, partition in places:
            partition_now = metadata.topics[topic].partitions.get(partition)
            start, end = starts.get((topic, partition)), ends.get((topic, partition))
            if partition_now is None or start is None or end is None:
                continue
            log = {"start": start, "leader": partition_now.leader, "isr": partition_now.isrs}
            if self._told.get((topic, partition)) != (log, end):
                self._told[topic, partition] = (log, end)
                yield {
                    "kind": "log",
                    "topic": topic,
                    "partition": partition,
                    "offset": end,
                    "at": at,
                    "detail": json.dumps(log),
                }

    def _topic_ids(self, names: list[str]) -> dict[str, str]:
        if not names:
            return {}
        admin, found = self._cluster._admin(), {}
        asked = admin.describe_topics(TopicCollection(names), request_timeout=ASK_WITHIN)
        for name, future in asked.items():
            with suppress(KafkaException):  # deleted in this very moment
                found[name] = _uuid(str(future.result().topic_id))
        return found

    def committed_ends(self) -> dict[int, int]:
        """Return where each partition of the offsets topic ends for a reader of committed data."""
        partitions = self._cluster._metadata().topics.get(OFFSETS)
        return self._ends(sorted(partitions.partitions) if partitions else [], True)

    def open_transactions(self) -> dict[int, int]:
        """Return the partitions of the offsets topic that a transaction holds up, and where."""
        stable, ends = self._ends(self.partitions, True), self._ends(self.partitions, False)
        waiting = {p: at for p, at in stable.items() if at < ends.get(p, 0)}
        # Most transactions end at once: only one that is still there at the second look is open.
        found = {p: at for p, at in waiting.items() if self._stable.get(p) == at}
        self._stable = waiting
        return found

    def _ends(self, partitions: list[int], committed: bool) -> dict[int, int]:
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        asked = {TopicPartition(OFFSETS, p): OffsetSpec.latest() for p in partitions}
        if not asked:
            return {}
        answers = self._cluster._admin().list_offsets(
            asked, isolation_level=level, request_timeout=ASK_WITHIN
        )
        found = {}
        for place, future in answers.items():
            with suppress(KafkaException):
                found[place.partition] = future.result().offset
        return found


def _uuid(text: str) -> str:
    """Return a topic id as Python writes it, from Kafka's base64."""
    import base64
    import uuid

    return str(uuid.UUID(bytes=base64.urlsafe_b64decode(text + "==")))
