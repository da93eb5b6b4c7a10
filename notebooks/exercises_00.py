"""The exercise of lesson 00, beside its notebook."""

from itertools import islice

from kafka import KafkaConsumer

from labkit.course import exercise, wrong


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
    topics = cluster.topics().set_index("topic")
    if "hello" not in topics.index:
        return wrong("There is no topic hello: run the cells above first, from the top.")
    keys = read_keys(cluster, int(topics.end["hello"]))
    yours = [offset for offset, key in keys.items() if key == b"you"]
    if answer in yours:
        return True
    if not yours:
        others = ", ".join(sorted({repr(key) for key in keys.values()})) or "none"
        return wrong(f'No record in hello has the key b"you" yet. The keys there: {others}.')
    if answer == max(keys) + 1:
        return wrong("That is where the next record will go. Offsets count from 0, not from 1.")
    if answer in keys:
        return wrong(f"At offset {answer} stands a record with the key {keys[answer]!r}.")
    return wrong(f"There is no such offset: the records in hello go from 0 to {max(keys)}.")


def read_keys(cluster, count):
    """Return the keys of the first records in hello, by offset."""
    consumer = KafkaConsumer(
        "hello",
        bootstrap_servers=cluster.bootstrap,
        auto_offset_reset="earliest",
        consumer_timeout_ms=10_000,
    )
    keys = {record.offset: record.key for record in islice(consumer, count)}
    consumer.close()
    return keys
