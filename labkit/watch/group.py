"""What is known of one group: its members, what they own and owned, how far they have read.

Which member owns a partition, the coordinator's records say; whether that owner works, the member
and its parent report. Both are kept apart and joined by time when a table is asked for, so that it
does not matter which of them arrived first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

ENDED = ("killed", "died", "failed", "stopped", "left")  # what ends a member's work for good
RESUMED = ("thawed", "started", "assigned")  # what lets it go on
CONSUMER_STATES = {0: "stable", 1: "giving up partitions", 2: "waiting for partitions"}

Place = tuple[str, int]  # a topic's name, or its id in the server-side protocol, and a partition
Row = tuple[Any, ...]


@dataclass
class Member:
    """A member as the coordinator knows it."""

    name: str  # its client id, if no other member has the same, else its id
    client: str
    host: str
    epoch: int | None = None
    state: str = "stable"


@dataclass
class Group:
    """What is known of one group."""

    name: str
    protocol: str = ""  # classic, consumer or share
    epoch: int | None = None
    members: dict[str, Member] = field(default_factory=dict)  # by the coordinator's id
    committed: dict[Place, list[int]] = field(default_factory=dict)  # offset, at, place in the log
    position: dict[Place, list[Any]] = field(default_factory=dict)  # offset, member
    # Who has a partition now: member (or None: nobody) to [since, the last sign of its work].
    owners: dict[Place, dict[str | None, list[int]]] = field(default_factory=dict)
    past: dict[Place, list[list[Any]]] = field(default_factory=dict)  # member, since, sign, until
    # What members and their parents reported: at, kind, and the places it is about, if not all.
    reports: dict[str, list[list[Any]]] = field(default_factory=dict)
    marks: list[list[Any]] = field(default_factory=list)  # at, what happened, member or epoch
    guess: dict[str, str] = field(default_factory=dict)  # a prediction: partition to member
    read: int = -1  # the place in the log of the newest record about members
    clock: int = 0  # its time, which never goes back, as brokers' clocks may

    # --- the coordinator's records ----------------------------------------------------------------

    def commit(self, place: Place, offset: int | None, at: int, log_offset: int) -> None:
        """Note a commit, or that the coordinator forgot one."""
        if offset is not None:
            self._sign(place, at)
        known = self.committed.get(place)
        if known is not None and known[2] > log_offset:
            return  # an older one that was read later, from behind an open transaction
        if offset is None:
            self.committed.pop(place, None)
        else:
            self.committed[place] = [offset, at, log_offset]

    def _sign(self, place: Place, at: int) -> None:
        """Note that whoever had a partition at a moment was at work then."""
        for span in self.owners.get(place, {}).values():
            if span[0] <= at:
                span[1] = max(span[1], at)
                continue
            for past in self.past.get(place, []):  # it was held up by an open transaction
                if past[1] <= at < past[3]:
                    past[2] = max(past[2], at)

    def generation(self, epoch: int | None, detail: dict[str, Any] | None, at: int) -> None:
        """Note a generation of the classic protocol: everyone's partitions at once."""
        members = detail["members"] if detail else []
        self.protocol, self.epoch = "classic", epoch
        old, self.members = self.members, {}
        for kept in (True, False):  # who stays keeps the name, who joins gets what is left
            for m in members:
                if (m["id"] in old) == kept:
                    name = old[m["id"]].name if kept else self._new_name(m["id"], m["client"])
                    self.members[m["id"]] = Member(name, m["client"], m["host"], epoch)
        self.marks.append([at, "generation", str(epoch)] if detail else [at, "deleted", ""])
        for id in {*old, *self.members} - ({*old} & {*self.members}):
            joined = id in self.members
            name = (self.members if joined else old)[id].name
            self.marks.append([at, "joined" if joined else "gone", name])
        owned: dict[Place, set[str | None]] = {place: set() for place in self.owners}
        for m in members:
            for topic, partitions in m["assigned"].items():
                for partition in partitions:
                    owned.setdefault((topic, partition), set()).add(self.members[m["id"]].name)
        for place, names in owned.items():
            self._close(place, at)  # the same owner too: before this record, all may have rested
            self.owners[place] = {name: [at, at] for name in names or {None}}

    def current(self, id: str, epoch: int | None, detail: dict[str, Any] | None, at: int) -> None:
        """Note what one member of the server-side protocol has."""
        member = self.members.get(id)
        if detail is not None:
            if member is None:  # compaction may leave this record before the one with its name
                member = self.members[id] = Member(id, "", "")
            member.epoch, member.state = epoch, CONSUMER_STATES.get(detail["state"], "unknown")
        elif member is None:
            return  # its end, told a second time
        has = {
            (topic, partition)
            for part in ("assigned", "revoking")
            for topic, partitions in (detail or {}).get(part, {}).items()
            for partition in partitions
        }
        had = {place for place, owners in self.owners.items() if member.name in owners}
        for place in had - has:
            self.owners[place][member.name][1] = at  # the record says that it had it until now
            self._close(place, at, member.name)
            if not self.owners[place]:
                self.owners[place] = {None: [at, at]}
        for place in has - had:
            self._close(place, at, None)
            self.owners.setdefault(place, {})[member.name] = [at, at]

    def member(self, protocol: str, id: str, detail: dict[str, Any] | None, at: int) -> None:
        """Note that a member of the server-side protocol joined, changed or left."""
        self.protocol = protocol
        if detail is None:
            self.current(id, None, None, at)
            if id in self.members:
                self.marks.append([at, "gone", self.members.pop(id).name])
        elif id not in self.members or not self.members[id].client:
            member = self.members.setdefault(id, Member(id, "", ""))
            member.client, member.host = detail["client"], detail["host"]
            for owners in self.owners.values():
                if member.name in owners:
                    owners[self._new_name(id, member.client)] = owners.pop(member.name)
            member.name = self._new_name(id, member.client)
            self.marks.append([at, "joined", member.name])

    def lose(self, places: list[Place], at: int) -> None:
        """Note that partitions are no more."""
        for place in places:
            for span in self.owners[place].values():
                span[1] = at
            self._close(place, at)
            del self.owners[place]

    def _new_name(self, id: str, client: str) -> str:
        taken = {member.name for member in self.members.values()}
        return id if not client or client in taken else client

    def _close(self, place: Place, at: int, *only: str | None) -> None:
        owners = self.owners.get(place, {})
        for name in only or list(owners):
            span = owners.pop(name, None)
            if span is not None and span[0] < at:
                self.past.setdefault(place, []).append([name, *span, at])

    # --- reports ----------------------------------------------------------------------------------

    def report(self, kind: str, member: str, detail: dict[str, Any] | None, at: int) -> None:
        """Note what a member or its parent reported."""
        if kind in ("position", "reset", "committed"):
            for topic, partitions in (detail or {}).items():
                for partition, offset in partitions.items():
                    self.position[topic, int(partition)] = [offset, member]
        elif kind in ("assigned", "revoked", "lost"):
            places = [(topic, p) for topic, ps in (detail or {}).items() for p in ps]
            self.reports.setdefault(member, []).append([at, kind, places])
        elif kind == "predicted":
            self.guess = {
                f"{topic}-{partition}": owner
                for topic, owners in (detail or {}).items()
                for partition, owner in owners.items()
            }
        elif kind in (*ENDED, *RESUMED, "frozen"):
            self.reports.setdefault(member, []).append([at, kind, None])

    # --- tables -----------------------------------------------------------------------------------

    def spans(
        self, names: dict[str, str], begin: int, only: set[Place] | None = None
    ) -> Iterator[Row]:
        """Yield topic, partition, member, since, until, state: the history of every partition."""
        wanted = self.past.keys() | self.owners.keys() if only is None else only
        spans = []
        for place in wanted:
            spans += [[place, *span] for span in self.past.get(place, ()) if span[3] > begin]
            owners = self.owners.get(place, {})
            spans += [[place, member, *span, None] for member, span in owners.items()]
        spans = [[(names.get(topic, topic), p), *span] for (topic, p), *span in spans]
        spans.sort(key=lambda span: (span[0], span[2], span[1] is not None))
        last: list[Any] = []
        for (place, member, since, sign, until), after in zip(spans, [*spans[1:], None]):
            if member is None and after and after[0] == place and not (until and until <= after[2]):
                until = after[2]  # the same partition by another topic id, or by name
            if since == until:
                continue
            for row in self._split(place, member, since, sign, until):
                if last and [*last[:3], last[4], last[5]] == [*place, row[0], row[1], row[3]]:
                    last[4] = row[2]  # the same owner in the same state goes on
                    continue
                if last:
                    yield tuple(last)
                last = [*place, *row]
        if last:
            yield tuple(last)

    def events(self, begin: int) -> list[list[Any]]:
        """Return at, what happened, and to which member or epoch, since a moment, in order."""
        faults = [
            [at, kind, member]
            for member, reports in self.reports.items()
            for at, kind, places in reports
            if places is None and kind != "started"
        ]
        return sorted(event for event in [*self.marks, *faults] if event[0] > begin)

    def _split(
        self, place: Place, member: str | None, since: int, sign: int, until: int | None
    ) -> Iterator[Row]:
        """Yield member, since, until, state of one owner's time, as it and its parent saw it."""
        if member is None:
            yield None, since, until, "unowned"
        elif member in self.reports:
            state, begin = self._state_before(member, since), since
            for at, kind, places in sorted(self.reports[member], key=lambda report: report[0]):
                if at < since or (until is not None and at >= until):
                    continue
                if places is not None and place not in places:
                    continue
                after = _after(kind, state)
                if after != state:
                    if begin < at:
                        yield (None if state == "unowned" else member), begin, at, state
                    state, begin = after, at
            yield (None if state == "unowned" else member), begin, until, state
        elif until is None:
            yield member, since, until, "owned"
        else:  # nobody told us when it stopped working: the last commit is the last we know
            sign = min(sign, until)
            if since < sign:
                yield member, since, sign, "owned"
            if sign < until:
                yield None, sign, until, "unknown"

    def _state_before(self, member: str, since: int) -> str:
        """Return whether a member was silent already when it was given a partition."""
        return "silent" if self.fault_of(member, since) else "owned"

    def fault_of(self, member: str, before: int | None = None) -> str | None:
        """Return what keeps a member from working, or did before a moment, if something does."""
        told = [
            report
            for report in self.reports.get(member, [])
            if report[1] in (*ENDED, *RESUMED, "frozen") and (before is None or report[0] < before)
        ]
        kind = sorted(told, key=lambda report: report[0])[-1][1] if told else None
        return None if kind in RESUMED else kind

    def is_gone(self, begin: int) -> bool:
        """Whether nothing is left of the group, and nothing of it happened since a moment."""
        if self.members or self.committed or self.clock > begin:
            return False
        return all(report[0] <= begin for reports in self.reports.values() for report in reports)

    def forget(self, begin: int) -> None:
        """Drop the history before a moment, but for what the rest of it needs to be told."""
        kept = {p: [span for span in past if span[3] > begin] for p, past in self.past.items()}
        self.past = {place: past for place, past in kept.items() if past}
        self.marks = [mark for mark in self.marks if mark[0] > begin]
        spans = [(member, since) for past in self.past.values() for member, since, _, _ in past]
        spans += [(m, span[0]) for owners in self.owners.values() for m, span in owners.items()]
        oldest: dict[str | None, int] = {}
        for name, since in spans:
            oldest[name] = min(since, oldest.get(name, begin))
        for member, reports in self.reports.items():
            since = oldest.get(member, begin)
            fault = self.fault_of(member, since) or "started"
            later = [report for report in reports if report[0] >= since]
            self.reports[member] = [[since - 1, fault, None], *later]


def _after(kind: str, state: str) -> str:
    """Return the state of a member's partition after a report."""
    if kind in ("revoked", "lost"):
        return "unowned"
    if kind in (*ENDED, "frozen"):
        return state if state == "unowned" else "silent"
    if kind == "assigned":
        return "owned"
    return "owned" if kind == "thawed" and state == "silent" else state


def fold(
    group: Group,
    kind: str,
    member: str | None,
    epoch: int | None,
    detail: Any,
    at: int,
    log_offset: int | None,
) -> None:
    """Take one event of a group, other than a commit."""
    if log_offset is not None:
        if log_offset <= group.read:
            return  # read before, from behind an open transaction
        group.read, group.clock = log_offset, max(at, group.clock)
        at = group.clock
    if kind == "generation":
        group.generation(epoch, detail, at)
    elif kind in ("current", "share current"):
        if detail is not None:
            group.protocol = "share" if kind == "share current" else "consumer"
        group.current(str(member), epoch, detail, at)
    elif kind == "member":
        group.member("consumer", str(member), detail, at)
    elif kind == "share member":
        group.member("share", str(member), detail, at)
    elif kind in ("epoch", "share epoch"):
        group.epoch = epoch
        group.marks.append([at, "epoch", str(epoch)])
    elif log_offset is None:
        group.report(kind, member or "", detail, at)


_BY_PLACE = ("committed", "position", "owners", "past")


def dump(group: Group) -> dict[str, Any]:
    """Return a group in JSON's terms, which know no tuple as a key."""
    told = asdict(group)
    for name in _BY_PLACE:
        told[name] = list(told[name].items())
    told["owners"] = [(place, list(owners.items())) for place, owners in told["owners"]]
    return told


def load(told: dict[str, Any]) -> Group:
    """Return the group that ``dump`` told of."""
    told = {**told, "members": {id: Member(**m) for id, m in told["members"].items()}}
    told["owners"] = [(place, dict(owners)) for place, owners in told["owners"]]
    for name in _BY_PLACE:
        told[name] = {tuple(place): value for place, value in told[name]}
    told["reports"] = {
        member: [[at, kind, places and [tuple(p) for p in places]] for at, kind, places in reports]
        for member, reports in told["reports"].items()
    }
    return Group(**told)
