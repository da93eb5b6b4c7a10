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
from functools import partial
from pathlib import Path
from typing import Any

FATAL = ("_FATAL", "FENCED_INSTANCE_ID")  # another has our name: the client never works again
POSITION_EVERY = 0.25  # seconds: often enough to see it move


def report(folder: Path, group: str, kind: str, member: str | None, detail: Any) -> None:
    """Append what happened to the lab's reports, as one line in one write."""
    line = {"group": group, "kind": kind, "member": member, "at": time.time_ns() // 1_000_000}
    text = json.dumps(line | {"epoch": None, "detail": detail})
    with (folder / "reports.jsonl").open("ab", buffering=0) as file:
        file.write(text.encode() + b"\n")


class Lab:
    """A member's link to its parent: reports go out, orders come in."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self.work_ms, self.stopping = 0.0, False
        self._folder = folder
        self._group, self._member = settings["group.id"], settings["client.id"]
        self._auto = settings["enable.auto.commit"]
        self._eager = settings.get("partition.assignment.strategy") in ("range", "roundrobin")
        self._orders = ""  # as last read
        self._targets: dict[tuple[str, int], int] = {}  # what is left of a reset
        self._told: dict[tuple[str, int], int] = {}  # how far we are, as last reported
        self._looked = 0.0
        self._trouble = ""
        # What a consumer calls when partitions come and go.
        self.assigned = partial(self._report_change, "assigned")
        self.revoked = partial(self._report_change, "revoked")
        self.lost = partial(self._report_change, "lost")  # taken while we were away

    def report(self, kind: str, detail: Any) -> None:
        """Report something about this member."""
        report(self._folder, self._group, kind, self._member, detail)

    def _report_change(self, kind: str, consumer: Any, partitions: Any) -> None:
        detail: dict[str, list[int]] = {}
        for p in sorted(partitions, key=lambda p: (p.topic, p.partition)):
            detail.setdefault(p.topic, []).append(p.partition)
            self._told.pop((p.topic, p.partition), None)
        self.report(kind, detail)

    def _report_offsets(self, kind: str, partitions: Any) -> bool:
        detail: dict[str, dict[str, int]] = {}
        for p in partitions:
            if p.error is None and p.offset >= 0:
                detail.setdefault(p.topic, {})[str(p.partition)] = p.offset
                self._told[p.topic, p.partition] = p.offset
        if detail:
            self.report(kind, detail)
        return bool(detail)

    def committed(self, partitions: Any) -> None:
        """Report offsets that the broker has taken."""
        for p in partitions:
            if p.error is not None:
                self.trouble(p.error)
        if self._report_offsets("committed", partitions):
            self._trouble = ""

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
            positions = consumer.position(consumer.assignment())
            moved = [p for p in positions if self._told.get((p.topic, p.partition)) != p.offset]
            self._report_offsets("position", moved)
        return not self.stopping

    def _read_orders(self) -> None:
        text = (self._folder / f"orders-{self._group}.json").read_text()
        if text != self._orders:
            self._orders, orders = text, json.loads(text)
            self.work_ms = orders["work_ms"].get(self._member, orders["work_ms"][""])
            self._targets = {(t, p): offset for t, p, offset in orders["reset"]}

    def _reset(self, consumer: Any) -> None:
        from confluent_kafka import KafkaException

        own = consumer.position(consumer.assignment())
        moved = [p for p in own if (p.topic, p.partition) in self._targets]
        for p in moved:
            p.offset = self._targets[p.topic, p.partition]
        try:
            if not self._auto:
                for p in moved:
                    consumer.seek(p)
            # Auto-commit would go on with what was read before, if these were not given anew.
            elif self._eager:
                consumer.assign(own)
            else:
                consumer.incremental_unassign(moved)
                consumer.incremental_assign(moved)
            done = consumer.commit(offsets=moved, asynchronous=False) if moved else []
        except KafkaException:
            return  # not fetched from yet, or a rebalance is under way: at the next turn
        self._report_offsets("reset", done)
        for p in done:
            if p.error is None:
                del self._targets[p.topic, p.partition]


def main() -> None:
    """Be a member, as the parent says on the command line."""
    given = json.loads(sys.argv[1])
    settings = given["settings"]
    lab = Lab(Path.cwd(), settings)
    signal.signal(signal.SIGTERM, lambda *_: setattr(lab, "stopping", True))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is meant for the notebook
    if given["commit"] == "auto":
        settings["on_commit"] = lab.auto_committed
    try:
        consume = runpy.run_path(str(Path(__file__).with_name("member.py")))["consume"]
        consume(settings, given["topics"], given["commit"], lab)
    except Exception:
        print(traceback.format_exc(), file=sys.stderr, flush=True)
        lab.report("failed", {"error": traceback.format_exc()})
        os._exit(1)  # as a crash: without a polite word to the group
    lab.report("left", {})


if __name__ == "__main__":
    main()
