"""What members and their parent report, and a member's ear for its parent; run as a member.

It needs neither labkit nor pandas, so that a member starts in a fraction of a second.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

FATAL = ("_FATAL", "FENCED_INSTANCE_ID")  # another has our name: the client never works again
POSITION_EVERY = 0.25  # seconds: often enough to see it move


def report(folder: Path, group: str, kind: str, member: str | None, detail: Any) -> None:
    """Append what happened to the lab's reports, as one line in one write."""
    line = {"group": group, "kind": kind, "member": member, "at": time.time_ns() // 1_000_000}
    text = json.dumps(line | {"epoch": None, "detail": detail})
    file = os.open(folder / "reports.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(file, text.encode() + b"\n")
    finally:
        os.close(file)


def offsets_of(partitions: Any) -> dict[str, dict[str, int]]:
    """Return the offsets in a client's list of partitions: by topic, then by partition."""
    found: dict[str, dict[str, int]] = {}
    for p in partitions:
        if p.error is None and p.offset >= 0:
            found.setdefault(p.topic, {})[str(p.partition)] = p.offset
    return found


class Lab:
    """A member's link to its parent: reports go out, orders come in."""

    def __init__(self, folder: Path, group: str, member: str) -> None:
        self.work_ms = 0.0
        self.stopping = False
        self._folder, self._group, self._member = folder, group, member
        self._orders_file = folder / f"orders-{group}.json"
        self._orders_read = (0, 0)  # which orders we know: when written, and where
        self._targets: dict[tuple[str, int], int] = {}  # what is left of a reset
        self._positions: dict[tuple[str, int], int] = {}
        self._looked = 0.0
        self._trouble = ""

    def report(self, kind: str, detail: Any) -> None:
        """Report something about this member."""
        report(self._folder, self._group, kind, self._member, detail)

    def assigned(self, consumer: Any, partitions: Any) -> None:
        """Report partitions that are ours from now on."""
        self._report_change("assigned", partitions)

    def revoked(self, consumer: Any, partitions: Any) -> None:
        """Report partitions that we give up."""
        self._report_change("revoked", partitions)

    def lost(self, consumer: Any, partitions: Any) -> None:
        """Report partitions that were taken from us while we were away."""
        self._report_change("lost", partitions)

    def _report_change(self, kind: str, partitions: Any) -> None:
        detail: dict[str, list[int]] = {}
        for p in sorted(partitions, key=lambda p: (p.topic, p.partition)):
            detail.setdefault(p.topic, []).append(p.partition)
            self._positions.pop((p.topic, p.partition), None)
        self.report(kind, detail)

    def committed(self, partitions: Any) -> None:
        """Report offsets that the broker has taken."""
        for p in partitions:
            if p.error is not None:
                self.trouble(p.error)
        if detail := offsets_of(partitions):
            self._trouble = ""
            self.report("committed", detail)

    def auto_committed(self, error: Any, partitions: Any) -> None:
        """Report what the client has committed by itself."""
        if error is None:
            self.committed(partitions)
        elif error.name() != "_NO_OFFSET":  # there was nothing new to commit
            self.trouble(error)

    def trouble(self, error: Any) -> None:
        """Report an error that the client gets over by itself, or die of one that it does not."""
        text = f"{error.name()}: {error.str()}"
        if error.fatal() or error.name() in FATAL:
            raise RuntimeError(text)
        if text != self._trouble:  # once, not with every record
            self._trouble = text
            self.report("error", {"error": text})

    def goes_on(self, consumer: Any) -> bool:
        """Carry out orders, report how far we are, and say whether the loop goes on."""
        self._read_orders()
        if self._targets:
            self._reset(consumer)
        if time.monotonic() - self._looked > POSITION_EVERY:
            self._looked = time.monotonic()
            self._report_positions(consumer)
        return not self.stopping

    def _read_orders(self) -> None:
        try:
            file = os.stat(self._orders_file)
            if (file.st_mtime_ns, file.st_ino) != self._orders_read:
                self._orders_read = (file.st_mtime_ns, file.st_ino)
                orders = json.loads(self._orders_file.read_text())
                self.work_ms = orders["work_ms"].get(self._member, orders["work_ms"][""])
                self._targets = {(t, p): offset for t, p, offset in orders["reset"]}
        except FileNotFoundError:
            pass  # the lab is being removed, and we with it

    def _reset(self, consumer: Any) -> None:
        from confluent_kafka import KafkaException, TopicPartition

        ours = {(p.topic, p.partition) for p in consumer.assignment()}
        for topic, partition in ours & set(self._targets):
            target = TopicPartition(topic, partition, self._targets[topic, partition])
            try:
                consumer.seek(target)
                done = offsets_of(consumer.commit(offsets=[target], asynchronous=False))
            except KafkaException:
                continue  # not fetched from yet, or a rebalance is under way: at the next turn
            if done:
                del self._targets[topic, partition]
                self._positions[topic, partition] = target.offset
                self.report("reset", done)

    def _report_positions(self, consumer: Any) -> None:
        moved: dict[str, dict[str, int]] = {}
        for topic, partitions in offsets_of(consumer.position(consumer.assignment())).items():
            for partition, offset in partitions.items():
                if self._positions.get((topic, int(partition))) != offset:
                    self._positions[topic, int(partition)] = offset
                    moved.setdefault(topic, {})[partition] = offset
        if moved:
            self.report("position", moved)


def main() -> None:
    """Be a member, as the parent says on the command line."""
    given = json.loads(sys.argv[1])
    lab = Lab(Path(given["folder"]), given["group"], given["settings"]["client.id"])
    signal.signal(signal.SIGTERM, lambda *_: setattr(lab, "stopping", True))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the notebook
    settings = given["settings"]
    if given["commit"] == "auto":
        settings["on_commit"] = lab.auto_committed
    try:
        consume = runpy.run_path(str(Path(__file__).with_name("member.py")))["consume"]
        consume(settings, given["topics"], given["commit"], lab)
    except Exception as error:
        assert error.__traceback__
        trace = traceback.format_exception(error.with_traceback(error.__traceback__.tb_next))
        print("".join(trace), file=sys.stderr, flush=True)
        lab.report("failed", {"error": "".join(trace)})
        os._exit(1)  # as a crash: without a polite word to the group
    lab.report("left", {})


if __name__ == "__main__":
    main()
