"""Ask a group's coordinator about it, in a process of its own that may die of the question.

The C client aborts its process when the connection to a coordinator breaks at the wrong moment
(librdkafka's issue 4605, open). In a lab brokers are killed all day, and the process is a kernel.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

ANSWER_WITHIN = 10.0  # seconds; the client itself gives up after five


class Asker:
    """A process that describes groups, started when it is first needed and after it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def describe(self, bootstrap: str, group: str) -> dict[str, Any] | None:
        """Return a group's state, and its members as (id, client, has, shall); None: no answer."""
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", __file__],  # not labkit: it is slow to import
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                    start_new_session=True,  # Ctrl-C is for the cell
                )
            process = self._process
            assert process.stdin and process.stdout
            with suppress(OSError, ValueError):
                process.stdin.write(json.dumps([bootstrap, group]) + "\n")
                process.stdin.flush()
                if select.select([process.stdout], [], [], ANSWER_WITHIN)[0]:
                    answer: dict[str, Any] | None = json.loads(process.stdout.readline())
                    return answer
            self._end()
            return None

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._end()

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    with suppress(OSError):
                        pipe.close()
            self._process = None


def main() -> None:
    """Answer until the input ends, as it does when the asking process does."""
    from confluent_kafka import KafkaException
    from confluent_kafka.admin import AdminClient

    admin, asked = None, ""
    for line in sys.stdin:
        bootstrap, group = json.loads(line)
        if bootstrap != asked:
            admin, asked = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0}), bootstrap
        try:
            assert admin is not None
            told = admin.describe_consumer_groups([group], request_timeout=5)[group].result()
            members = [
                (m.member_id, m.client_id, _places(m.assignment), _places(m.target_assignment))
                for m in told.members
            ]
            answer: Any = {"state": told.state.name, "members": members}
        except KafkaException:
            answer = None  # no coordinator knows of it
        print(json.dumps(answer), flush=True)


def _places(assignment: Any) -> list[tuple[str, int]] | None:
    return assignment and [(p.topic, p.partition) for p in assignment.topic_partitions]


if __name__ == "__main__":
    main()
