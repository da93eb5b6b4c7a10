"""What a group's members have reported so far, as their parent needs it."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

Partition = tuple[str, int]


class Heard:
    """Who says to own what, from the reports on one group since this was made."""

    def __init__(self, folder: Path, group: str) -> None:
        self.owned: dict[str, set[Partition]] = {}
        self.reset: set[Partition] = set()  # partitions that members have reset
        self.trouble: dict[str, str] = {}  # errors that members have not got over yet
        self.rebalances = 0
        self._file, self._group = folder / "reports.jsonl", group
        self._read_to = self._file.stat().st_size if self._file.exists() else 0

    def listen(self) -> None:
        """Take in what was reported since the last time."""
        with suppress(FileNotFoundError), self._file.open("rb") as file:
            file.seek(self._read_to)
            text = file.read()
            whole = text[: text.rfind(b"\n") + 1]
            self._read_to += len(whole)
            for line in map(json.loads, whole.splitlines()):
                if line["group"] == self._group and line["member"] in self.owned:
                    self._note(line["kind"], line["member"], line["detail"])

    def _note(self, kind: str, member: str, detail: Any) -> None:
        if kind in ("assigned", "revoked", "lost"):
            changed = {(topic, p) for topic, partitions in detail.items() for p in partitions}
            self.rebalances += bool(changed)  # an empty one may be the last word of the one before
            # What is assigned to one is no more another's, whatever a frozen one believes.
            for name in self.owned if kind == "assigned" else [member]:
                self.owned[name] -= changed
            if kind == "assigned":
                self.owned[member] |= changed
        elif kind == "reset":
            self.reset |= {(t, int(p)) for t, partitions in detail.items() for p in partitions}
        elif kind == "error":
            self.trouble[member] = detail["error"]
        elif kind in ("committed", "left"):
            self.trouble.pop(member, None)
