"""The exercise of lesson 00 looks at what really happened in the cluster."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kafka import KafkaAdminClient, KafkaProducer
from kafka.admin import NewTopic

import labkit
from labkit import course
from labkit.course import NOT_YET, RIGHT, WRONG, Exercise


@pytest.fixture(scope="module")
def cluster() -> Iterator[labkit.Cluster]:
    """One broker, as the exercise asks nothing of the others."""
    with labkit.start(brokers=1, name="lesson00", fresh=True) as cluster:
        yield cluster


@pytest.fixture
def producer(cluster: labkit.Cluster) -> Iterator[KafkaProducer]:
    """The topic hello with two records of others, as the learner meets it, and a producer."""
    admin = KafkaAdminClient(bootstrap_servers=cluster.bootstrap)
    admin.create_topics([NewTopic("hello", num_partitions=1, replication_factor=1)])
    cluster.wait_for("leaders", topic="hello")
    producer = KafkaProducer(bootstrap_servers=cluster.bootstrap)
    for key in (b"ada", b"grace"):
        producer.send("hello", key=key, value=b"Hello").get(timeout=10)
    yield producer
    producer.close(timeout=5)
    admin.delete_topics(["hello"])
    admin.close()


@pytest.fixture
def exercise(tmp_path, monkeypatch: pytest.MonkeyPatch) -> Exercise:
    monkeypatch.setenv("LABKIT_WORKSPACE", str(tmp_path))
    return course.exercises("00").your_own_record


def send(producer: KafkaProducer, key: bytes = b"you") -> int:
    return int(producer.send("hello", key=key, value=b"me").get(timeout=10).offset)


def test_the_offset_of_your_record_is_right(exercise, cluster, producer, capsys) -> None:
    assert send(producer) == 2
    assert exercise.check(2, cluster) == exercise.points == 1
    assert "✓ right" in capsys.readouterr().out
    assert exercise.state == RIGHT


def test_any_of_several_records_of_yours_is_right(exercise, cluster, producer) -> None:
    offsets = [send(producer), send(producer), send(producer, b"ada")]
    assert [exercise.judge(offset, cluster).kind for offset in offsets] == [RIGHT, RIGHT, WRONG]


def test_the_lessons_own_solution_is_right(exercise, cluster, producer) -> None:
    names = {"producer": producer}
    exec(exercise.lesson.solutions()["your_own_record"], names)
    assert exercise.judge(names["answer"], cluster).kind == RIGHT


def test_untouched_it_is_not_attempted(exercise, cluster, producer, capsys) -> None:
    send(producer)  # a record alone is no answer
    assert exercise.check(..., cluster) == 0
    assert "○ not attempted yet" in capsys.readouterr().out
    assert exercise.state == NOT_YET


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (0, "At offset 0 stands a record with the key b'ada'."),
        (3, "That is where the next record will go."),
        (4, "There is no such offset: the records in hello go from 0 to 2."),
        ("2", "An offset is a whole number."),
        (True, "An offset is a whole number."),
    ],
)
def test_a_wrong_answer_is_told_why(exercise, cluster, producer, capsys, answer, message) -> None:
    send(producer)
    assert exercise.check(answer, cluster) == 0
    said = capsys.readouterr().out
    assert said.startswith("✗ wrong") and message in said and f"Your answer: {answer!r}" in said
    assert exercise.state == WRONG


def test_the_whole_receipt_is_not_the_offset(exercise, cluster, producer) -> None:
    receipt = producer.send("hello", key=b"you", value=b"me").get(timeout=10)
    assert "the number is its `.offset`" in exercise.judge(receipt, cluster).text


def test_a_right_guess_without_a_record_is_wrong(exercise, cluster, producer) -> None:
    found = exercise.judge(2, cluster)
    assert found.kind == WRONG
    assert "has the key b\"you\" yet. The keys there: b'ada', b'grace'." in found.text


def test_without_the_topic_it_says_where_to_begin(exercise, cluster) -> None:
    found = exercise.judge(0, cluster)
    assert found.kind == WRONG and "There is no topic hello" in found.text
