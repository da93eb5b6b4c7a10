"""What an open transaction holds up: the end of a partition that committed reads do not reach yet.

Records of the offsets topic behind an open transaction wait for it, other groups' among them. They
are read here without waiting. Membership counts at once; a commit only once the coordinator itself
gives it as the group's offset, which it does not for one whose transaction is open or was aborted.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaException, TopicPartition

from labkit.watch.decode import batch_of, decode
from labkit.watch.log import OFFSETS

if TYPE_CHECKING:
    from labkit.cluster.cluster import Cluster

RAW = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("timestamp", pa.timestamp("us")),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
    ]
)


class Tail:
    """Readers of the partitions that are held up now."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._readers: dict[int, Consumer] = {}
        self._pending: dict[int, list[dict[str, Any]]] = {}
        self.ahead: dict[int, int] = defaultdict(lambda: -1)  # up to where membership was taken

    def read(self, held_up: dict[int, int], stream: dict[int, int]) -> pa.RecordBatch | None:
        """Return the events behind open transactions that need not wait for them."""
        for partition in set(self._readers) - set(held_up):
            self._readers.pop(partition).close()
            del self._pending[partition]
        found: list[dict[str, Any]] = []
        for partition, begin in held_up.items():
            if partition not in self._readers:
                if stream.get(partition, 0) < begin:
                    continue  # first what comes before it
                self._readers[partition] = self._reader(partition, begin)
                self._pending[partition] = []
            for event in self._new_events(partition):
                if event["kind"] == "commit":
                    self._pending[partition].append(event)
                elif event["log_offset"] > self.ahead[partition]:
                    self.ahead[partition] = event["log_offset"]
                    found.append(event)
            found += self._confirmed(partition)
        return batch_of(found)

    def _reader(self, partition: int, begin: int) -> Consumer:
        settings = {
            "bootstrap.servers": self._cluster._living_addresses(),
            "group.id": "labkit-watch",  # the client wants one; it joins nothing, commits nothing
            "enable.auto.commit": False,
            "isolation.level": "read_uncommitted",
            "log_level": 0,
            "error_cb": lambda error: None,
        }
        security = {k: v for k, v in self._cluster._client.items() if k != "bootstrap.servers"}
        reader = Consumer(settings | security)
        reader.assign([TopicPartition(OFFSETS, partition, begin)])
        return reader

    def _new_events(self, partition: int) -> list[dict[str, Any]]:
        records = self._readers[partition].consume(10_000, timeout=0.2)
        raw = [
            (r.key(), r.value(), r.timestamp()[1] * 1000, partition, r.offset())
            for r in records
            if r.error() is None
        ]
        columns = zip(*raw) if raw else [()] * len(RAW)
        arrays = [pa.array(column, RAW.field(i).type) for i, column in enumerate(columns)]
        batch = pa.RecordBatch.from_arrays(arrays, schema=RAW)
        return [event for events in decode(iter([batch])) for event in events.to_pylist()]

    def _confirmed(self, partition: int) -> list[dict[str, Any]]:
        """Return the commits that count by now; those that they replaced wait no longer."""
        waiting = self._pending[partition]
        known = {group: self._committed(group) for group in {event["group"] for event in waiting}}
        counts: dict[Any, dict[str, Any]] = {}
        for event in waiting:
            offsets, place = known[event["group"]], (event["topic"], event["partition"])
            if offsets is not None and offsets.get(place) == event["offset"]:
                counts[event["group"], place] = event
        self._pending[partition] = [
            event
            for event in waiting
            if (last := counts.get((event["group"], (event["topic"], event["partition"])))) is None
            or event["log_offset"] > last["log_offset"]
        ]
        return sorted(counts.values(), key=lambda event: int(event["log_offset"]))

    def _committed(self, group: str) -> dict[tuple[str, int], int | None] | None:
        """Return a group's offsets as its coordinator gives them, or None if it does not."""
        admin = self._cluster._admin()
        asked = admin.list_consumer_group_offsets(
            [ConsumerGroupTopicPartitions(group)], request_timeout=4.0
        )
        found: dict[tuple[str, int], int | None] = {}
        try:
            for place in asked[group].result().topic_partitions:
                known = place.offset if place.offset >= 0 else None
                found[place.topic, place.partition] = known
        except KafkaException:
            return None
        return found

    def close(self) -> None:
        """Let go of the readers."""
        for reader in self._readers.values():
            reader.close()
        self._readers.clear()
