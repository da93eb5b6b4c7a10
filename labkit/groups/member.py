"""What every member of a group runs, as group.source() shows it: a plain consumer's loop."""

from __future__ import annotations

import time
from typing import Any

from confluent_kafka import Consumer, KafkaException


def consume(settings: dict[str, Any], topics: list[str], commit: str, lab: Any) -> None:
    """Read, work and commit until told to stop; the lab hears of it, and says how long to work."""
    consumer = Consumer(settings)
    consumer.subscribe(topics, on_assign=lab.assigned, on_revoke=lab.revoked, on_lost=lab.lost)
    while lab.goes_on(consumer):
        record = consumer.poll(0.1)
        if record is None:
            continue
        if record.error():
            lab.trouble(record.error())
            continue
        if commit == "before":  # at most once: a crash while at work loses the record
            save(consumer, record, lab)
        time.sleep(lab.work_ms / 1000)
        if commit == "after":  # at least once: a crash while at work repeats the record
            save(consumer, record, lab)
    consumer.close()  # leaves the group at once; one that just dies is missed after its session


def save(consumer: Any, record: Any, lab: Any) -> None:
    """Commit the offset after a record's."""
    try:
        lab.committed(consumer.commit(record, asynchronous=False))
    except KafkaException as error:  # as when the partition is already someone else's
        lab.trouble(error.args[0])
