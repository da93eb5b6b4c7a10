"""A consumer group whose members are processes: to be started, broken and reset."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pandas as pd
from confluent_kafka import Consumer, KafkaException, TopicPartition

from labkit.cluster.cluster import Cluster
from labkit.cluster.embedded import EmbeddedCluster
from labkit.cluster.tools import Text
from labkit.errors import LabError, nearest
from labkit.groups import reports
from labkit.groups.asker import Asker
from labkit.groups.options import Target, check, place_to_reset_to, settings, target
from labkit.groups.spawn import Process, end_all, wait_until
from labkit.views.live import View, show_group

Partition = tuple[str, int]
Described = dict[str, tuple[str, set[Partition], set[Partition]]]  # by id: client, has, shall

LOOK_AGAIN = "look at the group (just type its name), or give more time with timeout="


class Prediction:
    """A guess of who will own which partition; show it to see what has come of it."""

    def __init__(self, guess: dict[Partition, str], before: Described) -> None:
        self.guess, self._before = guess, before
        self.actual: dict[Partition, str] | None = None  # who owned what after the rebalance

    @property
    def table(self) -> pd.DataFrame:
        """The guess as a table: partition, predicted, and after a rebalance actual and right."""
        rows = [(_name(place), member) for place, member in self.guess.items()]
        table = pd.DataFrame(rows, columns=["partition", "predicted"])
        if self.actual is not None:
            table["actual"] = [self.actual.get(place, "nobody") for place in self.guess]
            table["right"] = table.actual == table.predicted
        return table

    def __repr__(self) -> str:
        waiting = "\nwaiting for the next rebalance" if self.actual is None else ""
        return self.table.to_string(index=False) + waiting

    def _compare(self, members: Described) -> None:
        if self.actual is None and members != self._before:
            self.actual = _owners(members)


class Group:
    """A consumer group; each member is a process that runs the loop which ``source()`` shows."""

    def __init__(
        self,
        cluster: Cluster,
        name: str,
        topics: str | list[str],
        members: int = 2,
        *,
        assignor: str | None = None,
        protocol: str = "classic",
        static: bool = False,
        work_ms: float = 100,
        commit: str = "after",
        config: dict[str, Any] | None = None,
    ) -> None:
        cluster._check_open()
        if not isinstance(cluster, EmbeddedCluster):
            cluster._cannot("run a group's members")
        self.name, self.topics = name, [topics] if isinstance(topics, str) else topics
        check(name=name, topics=self.topics, members=members, work_ms=work_ms)
        own = {"bootstrap.servers": cluster.bootstrap, "group.id": name}
        self._settings = own | settings(protocol, assignor, commit) | (config or {})
        for topic in self.topics:
            cluster.wait_for("leaders", topic)
        self._static, self._commit, self._work_ms = static, commit, {"": work_ms}
        self._cluster, self._lease, self._closed = cluster, cluster._lease, False
        self._members: dict[str, Process] = {}
        self._ended: set[str] = set()  # members whose end has been reported
        self._owned: dict[str, set[Partition]] = {}  # as members report it
        self._reset: set[Partition] = set()  # as members report it
        self._predictions: list[Prediction] = []
        self._asker = Asker()
        self._lock = threading.Lock()  # button callbacks come from threads of their own
        self._own_name = re.compile(rf"{re.escape(name)}-[1-9]\d*")
        if name in cluster._groups:
            cluster._groups[name].close()
        cluster._groups[name] = self
        end_all(self._lease, f"member-{self._own_name.pattern}")
        self._reports, self._unread = (self._lease.folder / "reports.jsonl").open("a+b"), b""
        self._tell([])
        self.add(members)

    # --- what there is ----------------------------------------------------------------------------

    @property
    def members(self) -> pd.DataFrame:
        """A table: member, pid, state (running, frozen, dead, failed), partitions as it reports."""
        self._begin()
        rows = []
        for name, process in self._members.items():
            state = process.state
            own = sorted(self._owned[name]) if state in ("running", "frozen") else []
            rows.append((name, process.pid, state, [_name(place) for place in own]))
        self._refresh()  # so that a death is reported before it is shown
        return pd.DataFrame(rows, columns=["member", "pid", "state", "partitions"])

    def source(self) -> Text:
        """Return the program that every member runs."""
        return Text(Path(reports.__file__).with_name("member.py").read_text())

    def __repr__(self) -> str:
        if self._closed or self._cluster._closed:
            return f"consumer group {self.name!r}: closed"
        table = self.members
        table["partitions"] = table.partitions.map(", ".join)
        head = f"consumer group {self.name!r}, reading {', '.join(self.topics)}:\n"
        failed = [p for p in self._members.values() if p.state == "failed"]
        why = [f"\n{process.name} failed:\n{process.output}" for process in failed]
        return head + table.to_string(index=False) + "".join(why)

    # --- breaking it ------------------------------------------------------------------------------

    def add(self, members: int | str = 1) -> None:
        """Start so many new members, or a dead one again, given by its name."""
        if isinstance(members, str):
            if self._begin(members).alive:
                raise LabError(f"{members!r} is running already", "add() without a name adds one")
            return self._start(members)
        self._begin()
        check(members=members)
        for _ in range(members):
            self._start(f"{self.name}-{len(self._members) + 1}")

    def _start(self, name: str) -> None:
        instance = {"group.instance.id": name} if self._static else {}
        own = self._settings | {"client.id": name} | instance
        given = {"topics": self.topics, "commit": self._commit, "settings": own}
        argv = [sys.executable, "-P", "-u", reports.__file__, json.dumps(given)]
        self._owned[name] = set()
        self._members[name] = Process(self._lease, f"member-{name}", name, argv)
        self._ended.discard(name)
        self._report("started", name, {"pid": self._members[name].pid})

    def stop(self, member: str) -> None:
        """Ask a member to leave (SIGTERM): it finishes its record; others take over at once.

        A static member ends without leaving: it is expected back until its session is over.
        """
        process = self._begin(member)
        process.stop(5 + self._work_ms.get(member, self._work_ms[""]) / 1000)
        self._report_end(process)

    def kill(self, member: str) -> None:
        """End a member as a power cut would (SIGKILL): the group misses it after its session."""
        process = self._begin(member)
        with self._lock:  # or else _refresh, in another thread, takes it for a death of its own
            process.kill()
            self._ended.add(member)
        self._report_end(process)

    def _report_end(self, process: Process) -> None:
        self._ended.add(process.name)
        killed = process.exit_code == -signal.SIGKILL  # also if it took too long to stop
        self._report("killed" if killed else "stopped", process.name)

    def freeze(self, member: str) -> None:
        """Stop a member in its tracks (SIGSTOP): after its session, others own its partitions."""
        self._begin(member).freeze()
        self._report("frozen", member)

    def thaw(self, member: str) -> None:
        """Let a frozen member go on (SIGCONT), thinking that no time has passed."""
        self._begin(member).thaw()
        self._report("thawed", member)

    def slow(self, member: str, ms: float) -> None:
        """Have a member work for so many milliseconds on each record from now on."""
        self._begin(member)
        check(work_ms=ms)
        self._work_ms[member] = ms
        self._tell([])
        self._report("slowed", member, {"ms": ms})

    def show(self) -> View:
        """Show who owns what and how far it has read, live, with buttons that break it."""
        return show_group(self)

    def close(self) -> None:
        """End the group: every member leaves politely, or is killed if it takes too long."""
        if not self._closed:
            self._closed = True
            with suppress(LabError, OSError), ThreadPoolExecutor(50) as pool:  # the lab may be gone
                list(pool.map(self._dismiss, self._members.values()))
        self._asker.close()

    def _dismiss(self, process: Process) -> None:
        if process.alive:
            process.stop(5) if process.state == "running" else process.kill()
            self._report_end(process)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- waiting and predicting -------------------------------------------------------------------

    def wait_until_stable(self, timeout: float = 30) -> None:
        """Wait until every partition has an owner that runs, and each owner knows that it is.

        Predictions are compared now, if there was a rebalance since.
        """

        def problem() -> str:
            self._begin()
            if not self._running():
                what = f"no member of {self.name!r} is running"
                raise LabError(what, "group.add() one; the group (just type its name) shows why")
            state, members = self._described()
            unrest = self._unrest(state, members)
            if not unrest:
                for prediction in self._predictions:
                    prediction._compare(members)
            return unrest

        wait_until(problem, timeout, LOOK_AGAIN)

    def _described(self) -> tuple[str, Described]:
        """Return the group's state and its members, as the coordinator sees them."""
        told = self._asker.describe(self._cluster._living_addresses(), self.name)
        if told is None:
            return "UNKNOWN", {}
        members = {}
        for id, client, has, shall in told["members"]:
            members[id] = (client, _places(has), _places(has if shall is None else shall))
        return told["state"], members

    def _unrest(self, state: str, members: Described) -> str:
        """Say what is still missing for the group to be stable, or nothing."""
        running = Counter(self._running())  # and what the coordinator knows, they have reported
        # Only ours are counted: a consumer of a cell's may take part as well.
        clients = Counter(m for m, *_ in members.values() if self._own_name.fullmatch(m))
        if missing := running - clients:
            return f"{self.name!r} waits for {', '.join(missing)} to join"
        if gone := clients - running:
            return f"{self.name!r} still counts on {', '.join(gone)}, until its session is over"
        if state != "STABLE":
            return f"{self.name!r} is in state {state}"
        for client, has, shall in members.values():
            if not has == shall == self._owned.get(client, has):
                return f"{client} does not have yet what it shall own"
        unowned = set(self._partitions()) - set(_owners(members))
        return f"{self.name!r} has no owner for {_names(unowned)}" if unowned else ""

    def predict(self, owners: dict[Any, str]) -> Prediction:
        """Keep a guess of who will own which partition, and compare it after the next rebalance."""
        self._begin()
        check(owners=owners)
        known, guess = self._partitions(), {}
        detail: dict[str, dict[str, str]] = {}
        for given, member in owners.items():
            place = given if isinstance(given, tuple) else (self.topics[0], given)
            if place not in known:
                what = f"{self.name!r} reads no partition {given!r}"
                raise LabError(what, f"the partitions are: {_names(known)}")
            guess[place] = member
            detail.setdefault(place[0], {})[str(place[1])] = member
        self._report("predicted", None, detail)
        prediction = Prediction(guess, self._described()[1])
        self._predictions.append(prediction)
        return prediction

    # --- resetting --------------------------------------------------------------------------------

    def reset(
        self, *, by: int | None = None, to: Any = None, at: Any = None, timeout: float = 30
    ) -> pd.DataFrame:
        """Move the group's committed offsets; members that run seek there and commit it themselves.

        ``by``: so many records on, or back if negative. ``to``: "earliest" or "latest". ``at``: the
        first record since a datetime, or seconds since 1970.
        """
        self._begin()
        place = place_to_reset_to(by, to, at)
        self._reset.clear()
        # It subscribes to nothing, so it is no member of the group.
        outsider = Consumer({"bootstrap.servers": self._cluster.bootstrap, "group.id": self.name})
        targets: list[Target] = []

        def problem() -> str:
            try:
                if not targets:
                    targets.extend(target(outsider, *p, **place) for p in self._partitions())
                    self._tell(targets)
                if not self._running():  # refused while the group counts on one: not for long
                    asked = [TopicPartition(t, p, after) for t, p, _, after in targets]
                    done = outsider.commit(offsets=asked, asynchronous=False)
                    return "".join(f"{p.error}; " for p in done if p.error)
            except KafkaException as error:
                return f"{self.name!r} cannot be reset: {error.args[0].str()}"
            left = {(topic, p) for topic, p, *_ in targets} - self._reset
            return f"no member has reset {_names(left)}" if left else ""

        try:
            wait_until(problem, timeout, LOOK_AGAIN)
        finally:
            outsider.close()
            self._tell([])  # whoever starts later is not meant
        table = pd.DataFrame(targets, columns=["topic", "partition", "before", "after"])
        return table.astype({"before": "Int64", "after": "Int64"})

    # --- members and what they report -------------------------------------------------------------

    def _begin(self, member: Any = None) -> Any:
        """Do what every verb does first, and return the process of the member in question."""
        self._cluster._check_open()
        if self._closed:
            to_do = f"start it again: cluster.group({self.name!r}, …)"
            raise LabError(f"the group {self.name!r} is closed", to_do)
        self._refresh()
        if member is not None and member not in self._members:
            what = f"{self.name!r} has no member {member!r}{nearest(str(member), self._members)}"
            raise LabError(what, f"its members are: {', '.join(self._members)}")
        return self._members.get(member)

    def _partitions(self) -> list[Partition]:
        topics = self._cluster._metadata().topics
        return [(t, p) for t in self.topics if t in topics for p in sorted(topics[t].partitions)]

    def _running(self) -> list[str]:
        self._refresh()
        return [name for name, process in self._members.items() if process.state == "running"]

    def _report(self, kind: str, member: str | None, detail: Any = None) -> None:
        reports.report(self._lease.folder, self.name, kind, member, detail or {})

    def _tell(self, targets: list[Target]) -> None:
        """Give the members their orders: how long to work, and which offsets to reset to."""
        reset = [(topic, partition, after) for topic, partition, _, after in targets]
        orders = {"at": time.time_ns(), "work_ms": self._work_ms, "reset": reset}
        file = self._lease.folder / f"orders-{self.name}.json"
        file.with_suffix(".new").write_text(json.dumps(orders))
        file.with_suffix(".new").replace(file)

    def _refresh(self) -> None:
        """Take in what members have reported since, and report who has died."""
        with self._lock:
            *lines, self._unread = (self._unread + self._reports.read()).split(b"\n")
            for told in map(json.loads, lines):
                if told["group"] == self.name and told["member"] in self._owned:
                    self._note(**told)
            for name, process in self._members.items():
                if name not in self._ended and process.exit_code:  # with 0, it said itself: left
                    self._ended.add(name)
                    self._report("died", name, {"exit": process.exit_code})

    def _note(self, kind: str, member: str, detail: Any, **_: Any) -> None:
        if kind in ("assigned", "revoked", "lost", "reset"):
            places = {(topic, int(p)) for topic, partitions in detail.items() for p in partitions}
            if kind == "reset":
                self._reset |= places
                return
            # What is assigned to one is no more another's, whatever a frozen one believes.
            for name in self._owned if kind == "assigned" else [member]:
                self._owned[name] -= places
            if kind == "assigned":
                self._owned[member] |= places


def _name(place: Partition) -> str:
    return f"{place[0]}-{place[1]}"


def _names(places: Iterable[Partition]) -> str:
    return ", ".join(map(_name, sorted(places)))


def _places(listed: list[Any]) -> set[Partition]:
    return {(topic, partition) for topic, partition in listed}


def _owners(members: Described) -> dict[Partition, str]:
    return {place: client for client, has, _ in members.values() for place in has}
