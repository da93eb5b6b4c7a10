"""A consumer group whose members are processes: to be started, broken and reset."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import pandas as pd

from labkit.cluster.cluster import Cluster
from labkit.cluster.embedded import EmbeddedCluster
from labkit.cluster.tools import Text
from labkit.errors import LabError, nearest
from labkit.groups import options, reports, resets, stability
from labkit.groups.heard import Heard, Partition
from labkit.groups.predictions import Prediction
from labkit.groups.process import Process, free, wait_until

LOOK_AGAIN = "look at the group (just type its name), or give more time with timeout="


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
        **unknown: Any,
    ) -> None:
        cluster._check_open()
        if not isinstance(cluster, EmbeddedCluster):
            cluster._cannot("run a group's members")
        options.check(name, protocol, assignor, static, commit, config, unknown)
        options.check_count(members, 0)
        assignor = assignor or options.ASSIGNORS[protocol][0]
        self.name, self.topics = name, options.check_topics(cluster, topics)
        self._cluster, self._lease = cluster, cluster._lease
        self._static, self._commit = static, commit
        self._work_ms = {"": options.milliseconds("work_ms", work_ms)}
        self._lock, self._closed = threading.RLock(), False
        self._members: dict[str, Process] = {}
        self._leaving: set[str] = set()  # those that we end ourselves, at this moment
        self._ended: dict[str, str] = {}  # the dead ones, and why if by themselves
        self._targets: dict[Partition, int] = {}  # of a reset that members are carrying out
        self._predictions: list[Prediction] = []
        self._settings = options.settings(
            cluster.bootstrap, name, protocol, assignor, commit, config or {}
        )
        if name in cluster._groups:
            cluster._groups[name].close()
        ours = re.compile(rf"member-{re.escape(name)}-\d+")
        running = [n for n in self._lease.ask("status")["processes"] if ours.fullmatch(n)]
        free(self._lease, running, f"the group {name!r}")
        self._heard = Heard(self._lease.folder, name)
        cluster._groups[name] = self
        try:
            self.add(members)
        except BaseException:
            self.close()
            raise

    # --- what there is ----------------------------------------------------------------------------

    @property
    def members(self) -> pd.DataFrame:
        """A table of the members: member, pid, state (running, frozen, dead, failed), partitions.

        The partitions are those that the member itself has last reported as its own.
        """
        self._check_open()
        processes = self._refresh()
        rows = []
        for name in self._members:
            status = processes[f"member-{name}"]
            state = "failed" if self._ended.get(name) else status["state"]
            rows.append((name, status["pid"], state, [f"{t}-{p}" for t, p in self._own(name)]))
        return pd.DataFrame(rows, columns=["member", "pid", "state", "partitions"])

    def source(self) -> Text:
        """Return the program that every member runs."""
        return Text(Path(reports.__file__).with_name("member.py").read_text())

    def __repr__(self) -> str:
        if self._closed or self._cluster._closed:
            return f"consumer group {self.name!r}: closed"
        try:
            table = self.members
        except LabError as error:
            return f"consumer group {self.name!r}: {error.what}\n{error.to_do}"
        table["partitions"] = [", ".join(partitions) for partitions in table.partitions]
        why = [f"\n{name} failed:\n{text}" for name, text in self._ended.items() if text]
        topics = ", ".join(self.topics)
        head = f"consumer group {self.name!r}, reading {topics}:\n"
        return head + table.to_string(index=False) + "".join(why)

    # --- breaking it ------------------------------------------------------------------------------

    def add(self, members: int | str = 1) -> None:
        """Start so many new members, or a dead one again, given by its name."""
        self._begin()
        if isinstance(members, str):
            if self._process(members).alive:
                raise LabError(f"{members!r} is running already", "add() without a name adds one")
            with self._lock:
                return self._start(members)
        options.check_count(members, len(self._members) - len(self._ended))
        for _ in range(members):
            with self._lock:
                self._start(f"{self.name}-{len(self._members) + 1}")

    def _start(self, name: str) -> None:
        process = self._members.get(name) or Process(self._lease, f"member-{name}", name)
        instance = {"group.instance.id": name} if self._static else {}
        given = {
            "folder": str(self._lease.folder),
            "group": self.name,
            "topics": self.topics,
            "commit": self._commit,
            "settings": self._settings | {"client.id": name} | instance,
        }
        self._tell()
        argv = [sys.executable, "-P", "-u", reports.__file__, json.dumps(given)]
        process._spawn(argv, self._lease.folder)
        self._members[name], self._heard.owned[name] = process, set()
        self._ended.pop(name, None)
        self._report("started", name, {"pid": process.pid})

    def stop(self, member: str) -> None:
        """Ask a member to leave (SIGTERM): it finishes its record; others take over at once.

        A static member ends without leaving: it is expected back until its session is over.
        """
        self._end(self._begin(member), "stopped")

    def kill(self, member: str) -> None:
        """End a member as a power cut would (SIGKILL): the group misses it after its session."""
        self._end(self._begin(member), "killed")

    def _end(self, process: Process, kind: str) -> None:
        self._leaving.add(process.name)
        try:
            if kind == "stopped":
                ms = self._work_ms.get(process.name, self._work_ms[""])
                process.stop(within=5 if self._closed else 5 + ms / 1000)
                if process.exit_code == -signal.SIGKILL:  # it took too long
                    kind = "killed"
            else:
                process.kill()
            self._ended[process.name] = ""
            self._report(kind, process.name)
        finally:
            self._leaving.discard(process.name)

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
        process = self._begin(member)
        if not process.alive:
            raise LabError(f"cannot slow {member!r}: it is dead", f"group.add({member!r}) first")
        self._work_ms[member] = options.milliseconds("ms", ms)
        self._tell()
        self._report("slowed", member, {"ms": ms})

    # --- waiting and predicting -------------------------------------------------------------------

    def wait_until_stable(self, timeout: float = 30) -> None:
        """Wait until every partition has an owner that runs, and each owner knows that it is."""
        self._begin()

        def problem() -> str:
            self._check_open()
            if not self._running():
                why = "".join(f"\n{text}" for text in self._ended.values() if text)
                raise LabError(f"no member of {self.name!r} is running{why}", "group.add() one")
            return self._look()[0]

        wait_until(problem, timeout, LOOK_AGAIN)
        self._settle()

    def predict(self, owners: dict[Any, str]) -> Prediction:
        """Keep a guess of who will own which partition, and compare it after the next rebalance."""
        self._begin()
        if not isinstance(owners, dict) or not owners:
            raise LabError(
                f"{owners!r} predicts nothing",
                f'give partitions and members, for example {{0: "{self.name}-1"}}',
            )
        guess = {self._partition(partition): member for partition, member in owners.items()}
        for member in guess.values():
            if not re.fullmatch(rf"{re.escape(self.name)}-[1-9]\d*", str(member)):
                raise self._unknown(member)
        detail: dict[str, dict[str, str]] = {}
        for (topic, partition), member in guess.items():
            detail.setdefault(topic, {})[str(partition)] = member
        self._report("predicted", None, detail)
        prediction = Prediction(guess, (self._heard.rebalances, self._clients()), self._settle)
        self._predictions.append(prediction)
        return prediction

    def _settle(self) -> None:
        waiting = [p for p in self._predictions if p.actual is None]
        if waiting and not self._closed and not self._cluster._closed:
            self._refresh()
            problem, owners = self._look()
            for prediction in waiting:
                if not problem and prediction.made_at != (self._heard.rebalances, self._clients()):
                    prediction.actual = owners

    def _clients(self) -> list[str]:
        described = stability.describe(self._cluster, self.name)
        return sorted(member.client_id for member in described.members) if described else []

    def _look(self) -> tuple[str, dict[Partition, str]]:
        described = stability.describe(self._cluster, self.name)
        running = self._running()  # after the question: what was answered, they have reported
        partitions = set(self._partitions())
        problem = stability.unrest(described, self.name, running, self._heard, partitions)
        return problem, stability.owners_of(described)

    # --- resetting --------------------------------------------------------------------------------

    def reset(
        self, *, by: int | None = None, to: Any = None, at: Any = None, timeout: float = 30
    ) -> pd.DataFrame:
        """Move the group's committed offsets; members that run seek there and commit it themselves.

        ``by``: so many records on, or back if negative. ``to``: "earliest", "latest" or offsets
        {partition: offset}. ``at``: the first record since a datetime, or seconds since 1970.
        """
        self._begin()
        resets.check(by, to, at)
        before = resets.committed(self._cluster, self.name)
        if isinstance(to, dict):
            to = {self._partition(partition): offset for partition, offset in to.items()}
        targets = resets.targets(self._cluster, self._partitions(), before, by, to, at)
        if self._running():
            self._reset_by_members(targets, timeout)
        else:  # refused while the group counts on a member that was killed: not for long
            wait_until(lambda: resets.alter(self._cluster, self.name, targets), timeout, LOOK_AGAIN)
        rows = [(*p, before.get(p), target) for p, target in targets.items()]
        table = pd.DataFrame(rows, columns=["topic", "partition", "before", "after"])
        return table.astype({"before": "Int64", "after": "Int64"})

    def _reset_by_members(self, targets: dict[Partition, int], timeout: float) -> None:
        with self._lock:
            self._refresh()
            self._heard.reset.clear()
            self._targets = targets
            self._tell()

        def problem() -> str:
            self._refresh()
            left = [f"{t}-{p}" for t, p in targets if (t, p) not in self._heard.reset]
            return f"no member has reset {', '.join(left)}" if left else ""

        try:
            wait_until(problem, timeout, LOOK_AGAIN)
        finally:
            self._targets = {}  # whoever starts later is not meant
            self._tell()

    # --- the end ----------------------------------------------------------------------------------

    def close(self) -> None:
        """End the group: every member leaves politely, or is killed if it takes too long."""
        if self._closed:
            return
        self._closed = True
        with suppress(LabError):  # the lab may be gone already
            self._refresh()
            living = [p for name, p in self._members.items() if name not in self._ended]
            threads = [
                threading.Thread(target=self._farewell, args=[process]) for process in living
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

    def _farewell(self, process: Process) -> None:
        with suppress(LabError, OSError):  # the lab may end just now
            self._end(process, "stopped" if process.state == "running" else "killed")

    def __enter__(self) -> Group:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # --- members and what they report -------------------------------------------------------------

    def _begin(self, member: Any = None) -> Any:
        # What every verb does first; predictions are about the rebalance before this one's.
        self._check_open()
        self._refresh()
        self._settle()
        return None if member is None else self._process(member)

    def _check_open(self) -> None:
        self._cluster._check_open()
        if self._closed:
            raise LabError(
                f"the group {self.name!r} is closed",
                f"start it again: cluster.group({self.name!r}, …)",
            )

    def _process(self, member: Any) -> Process:
        if member not in self._members:
            raise self._unknown(member)
        return self._members[member]

    def _unknown(self, member: Any) -> LabError:
        return LabError(
            f"{self.name!r} has no member {member!r}{nearest(str(member), self._members)}",
            f"its members are: {', '.join(self._members)}",
        )

    def _partitions(self) -> list[Partition]:
        topics = self._cluster._metadata().topics
        return [(t, p) for t in self.topics if t in topics for p in sorted(topics[t].partitions)]

    def _partition(self, given: Any) -> Partition:
        known = self._partitions()
        found = given if isinstance(given, tuple) else (self.topics[0], given)
        if found not in known or isinstance(given, bool):
            raise LabError(
                f"{self.name!r} reads no partition {given!r}",
                f"the partitions are: {', '.join(f'{t}-{p}' for t, p in known)}",
            )
        return found

    def _running(self) -> list[str]:
        processes = self._refresh()
        return [n for n in self._members if processes[f"member-{n}"]["state"] == "running"]

    def _own(self, name: str) -> list[Partition]:
        return [] if name in self._ended else sorted(self._heard.owned[name])

    def _report(self, kind: str, member: str | None, detail: Any = None) -> None:
        reports.report(self._lease.folder, self.name, kind, member, detail or {})

    def _tell(self) -> None:
        orders = {
            "work_ms": self._work_ms,
            "reset": [(*partition, offset) for partition, offset in self._targets.items()],
        }
        file = self._lease.folder / f"orders-{self.name}.json"
        file.with_suffix(".new").write_text(json.dumps(orders))
        file.with_suffix(".new").replace(file)

    def _refresh(self) -> dict[str, Any]:
        """Read what was reported since, notice who has died, and return the guard's processes."""
        with self._lock:
            processes: dict[str, Any] = self._lease.ask("status")["processes"]
            self._heard.listen()
            for name in set(self._members) - set(self._ended) - self._leaving:
                code = processes[f"member-{name}"]["exit"]
                if code is not None:
                    # By a signal it was ended from outside; else its output says what it was.
                    self._ended[name] = self._members[name].output.strip() if code > 0 else ""
                    self._report("died", name, {"exit": code})
        return processes
