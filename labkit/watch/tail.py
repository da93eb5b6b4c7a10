"""What an open transaction holds up: the end of a partition that committed reads do not reach yet.

Records of the offsets topic behind an open transaction wait for it, other groups' among them. They
are read here without waiting. Membership counts at once; a commit only once the coordinator itself
gives it as the group's offset, which it does not for one whose transaction is open or was aborted.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from confluent_kafka import Consumer, KafkaException, TopicPartition

from labkit.watch.decode import batch_of, decode
from labkit.watch.group import Place
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
        self._askers: dict[str, Consumer] = {}
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
        reader = self._client("labkit-watch")
        reader.assign([TopicPartition(OFFSETS, partition, begin)])
        return reader

    def _client(self, group: str) -> Consumer:
        settings = {
            "bootstrap.servers": self._cluster._living_addresses(),
            "group.id": group,  # it joins nothing and commits nothing
            "enable.auto.commit": False,
            "isolation.level": "read_uncommitted",
            "log_level": 0,
            "error_cb": lambda error: None,
        }
        security = {k: v for k, v in self._cluster._client.items() if k != "bootstrap.servers"}
        return Consumer(settings | security)

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
        places: dict[str, set[Place]] = defaultdict(set)
        for event in waiting:
            places[event["group"]].add((event["topic"], event["partition"]))
        known = {group: self._committed(group, asked) for group, asked in places.items()}
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

    def _committed(self, group: str, places: set[Place]) -> dict[Place, int | None] | None:
        """Return a group's offsets as its coordinator gives them, or None if it does not."""
        # Not by the admin client, which can abort the process (librdkafka's issue 4605).
        asked = [TopicPartition(*place) for place in places]
        try:
            if group not in self._askers:
                self._askers[group] = self._client(group)
            told = self._askers[group].committed(asked, timeout=4.0)
        except KafkaException:
            return None
        return {(p.topic, p.partition): p.offset if p.offset >= 0 else None for p in told}

    def close(self) -> None:
        """Let go of the readers."""
        for client in (*self._readers.values(), *self._askers.values()):
            client.close()
        self._readers.clear()
        self._askers.clear()
