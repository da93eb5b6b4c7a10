"""The exercise of lesson 00, beside its notebook."""

from kafka import KafkaConsumer, TopicPartition

from labkit.course import exercise, wrong

HELLO = TopicPartition("hello", 0)


@exercise(
    hints=[
        'The cell under "Send a record" does almost the same: only the key is another.',
        'Keys are bytes: `key=b"you"`, with the b. The value may say what you like.',
        "`.get(timeout=10)` gives you the broker's answer, and `.offset` is part of it.",
    ],
    why="The broker numbers the records of a partition in the order in which it stores them. You "
    "learn a record's offset from its answer, and with topic, partition and offset anyone can "
    "find your record again.",
)
def your_own_record(answer, cluster):
    """Send a record with the key b"you" to the topic hello. Which offset did it get?"""
    if isinstance(answer, bool) or not isinstance(answer, int):
        return wrong(
            "An offset is a whole number. `send(…).get(timeout=10)` gives the broker's whole "
            "answer; the number is its `.offset`."
        )
    keys = read_keys(cluster)
    yours = [offset for offset, key in keys.items() if key == b"you"]
    if answer in yours:
        return True
    if not yours:
        others = sorted({repr(key) for key in keys.values()})
        return wrong(
            f'No record in hello has the key b"you" yet. The keys there: {", ".join(others)}.'
        )
    if answer == max(keys) + 1:
        return wrong("That is where the next record will go. Offsets count from 0, not from 1.")
    if answer in keys:
        return wrong(f"At offset {answer} stands a record with the key {keys[answer]!r}.")
    return wrong(f"There is no such offset: the records in hello go from 0 to {max(keys)}.")


def read_keys(cluster):
    """Return the key of every record in the topic, by offset."""
    consumer = KafkaConsumer(bootstrap_servers=cluster.bootstrap, consumer_timeout_ms=10_000)
    try:
        consumer.assign([HELLO])
        consumer.seek_to_beginning(HELLO)
        end, keys = consumer.end_offsets([HELLO])[HELLO], {}
        while consumer.position(HELLO, timeout_ms=10_000) < end:
            record = next(consumer)
            keys[record.offset] = record.key
        return keys
    finally:
        consumer.close()
