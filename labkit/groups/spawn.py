"""Processes that a lab's guard runs, so that none outlives the lab; %%spawn makes one of a cell."""

from __future__ import annotations

import keyword
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from labkit import cluster as clusters
from labkit.cluster.embedded import EmbeddedCluster
from labkit.cluster.lease import Lease
from labkit.cluster.tools import Text
from labkit.errors import LabError
from labkit.progress import in_notebook

TAIL = 1_000_000  # bytes of a log that are worth reading
SHOWN = 200  # lines under the cell; .output has more
REDRAW = 0.2  # seconds between two looks at what was printed
NEXT = {"frozen": "thaw it first, or kill it", "running": "it is running as it should"}


def wait_until(problem: Callable[[], str], timeout: float, to_do: str) -> None:
    """Wait until nothing is the matter; in the end, say what still is."""
    deadline = time.monotonic() + timeout
    while text := problem():
        if time.monotonic() > deadline:
            raise LabError(f"after {timeout:g} s, {text}", to_do)
        time.sleep(0.05)


def end_all(lease: Lease, ids: str) -> None:
    """End what runs under such ids, a regular expression: an earlier kernel has left it."""
    for id, status in lease.ask("status")["processes"].items():
        if re.fullmatch(ids, id) and status["state"] != "dead":
            lease.ask("signal", name=id, number=signal.SIGKILL)


class Process:
    """A process, by the id that the guard knows it by and the name that a learner does."""

    def __init__(self, lease: Lease, id: str, name: str, argv: list[str]) -> None:
        self.name = name
        self._lease, self._id, self._log = lease, id, lease.folder / f"{id}.log"
        self._log.unlink(missing_ok=True)
        folder, log = str(lease.folder), str(self._log)
        started = lease.ask("spawn", name=id, argv=argv, log=log, cwd=folder)
        self._seen: dict[str, Any] = started["processes"][id]

    def _status(self) -> dict[str, Any]:
        try:
            self._seen = self._lease.ask("status")["processes"][self._id]
        except LabError:  # the lab has ended, and with it all that had not
            exit = self._seen["exit"]
            self._seen |= {"state": "dead", "exit": -signal.SIGKILL if exit is None else exit}
        return self._seen

    @property
    def pid(self) -> int:
        """The number that the system gave the process."""
        return int(self._seen["pid"])

    @property
    def state(self) -> str:
        """How the process is: running, frozen, dead, or failed if it died of an error."""
        status = self._status()
        return "failed" if (status["exit"] or 0) > 0 else str(status["state"])

    @property
    def alive(self) -> bool:
        """Whether the process has not ended; a frozen one has not."""
        return self._status()["exit"] is None

    @property
    def exit_code(self) -> int | None:
        """The code that the process has ended with; minus the number of the signal if by one."""
        code: int | None = self._status()["exit"]
        return code

    @property
    def output(self) -> Text:
        """What the process has printed, errors too; of very much, the end."""
        with suppress(FileNotFoundError), self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, 2) - TAIL))
            return Text(log.read().decode(errors="replace"))
        return Text("")

    def kill(self) -> None:
        """End the process as a power cut would (SIGKILL)."""
        self._signal("kill", signal.SIGKILL, "running", "frozen")

    def freeze(self) -> None:
        """Stop the process in its tracks (SIGSTOP): it is there and does nothing."""
        self._signal("freeze", signal.SIGSTOP, "running")

    def thaw(self) -> None:
        """Let a frozen process go on (SIGCONT)."""
        self._signal("thaw", signal.SIGCONT, "frozen")

    def stop(self, within: float = 10) -> None:
        """Ask the process to end (SIGTERM), and kill it if it has not ended in time."""
        self._signal("stop", signal.SIGTERM, "running")
        deadline = time.monotonic() + within
        while self.alive and time.monotonic() < deadline:
            time.sleep(0.05)
        with suppress(LabError):  # as a rule it is dead by now
            self.kill()

    def _signal(self, verb: str, number: int, *allowed: str) -> None:
        state = self.state
        if state not in allowed:
            to_do = NEXT.get(state, "start it again")
            raise LabError(f"cannot {verb} {self.name!r}: it is {state}", to_do)
        self._lease.ask("signal", name=self._id, number=number)


class Program(Process):
    """A cell that runs in a process of its own: kill it, freeze it, read its output."""

    def __init__(self, cluster: EmbeddedCluster, name: str, cell: str) -> None:
        end_all(cluster._lease, f"program-{name}")
        file = cluster._lease.folder / f"{name}.py"
        # One line above, as the magic is in the notebook: tracebacks count as the learner does.
        file.write_text(f"BOOTSTRAP = {cluster.bootstrap!r}\n{cell}")
        argv = [sys.executable, "-P", "-u", str(file)]
        super().__init__(cluster._lease, f"program-{name}", name, argv)

    def wait(self, timeout: float = 30) -> int | None:
        """Wait until the program has ended, and return its exit code."""
        wait_until(
            lambda: f"{self.name!r} is {self.state}" if self.alive else "",
            timeout,
            f"give more time with timeout=, or end it: {self.name}.kill()",
        )
        return self.exit_code

    def __repr__(self) -> str:
        if self.alive:
            return f"program {self.name!r}: {self.state} as pid {self.pid}"
        return f"program {self.name!r}: ended with exit code {self.exit_code}"

    def _follow(self, handle: Any) -> None:
        """Show what is printed, as it comes, until the program has ended."""
        alive, shown = True, ""
        while alive:
            alive = self.alive  # before the last look, so that no last words are missed
            text = "\n".join(self.output.splitlines()[-SHOWN:])
            if text != shown:
                shown = text
                handle.update({"text/plain": text}, raw=True)
            time.sleep(REDRAW)


def spawn(line: str, cell: str) -> None:
    """Run the cell as a program called ``line``, known by that name in the notebook."""
    shell, name = sys.modules["IPython"].get_ipython(), line.strip()
    if not name.isidentifier() or keyword.iskeyword(name):
        raise LabError(f"{name!r} cannot be the name of a program", "write %%spawn shipper")
    old = shell.user_ns.get(name)
    if old is not None and not isinstance(old, Program):
        what = f"{name!r} already names a {type(old).__name__} here"
        raise LabError(what, "give the program another name")
    open_ones = [cluster for cluster in clusters._held.values() if not cluster._closed]
    if not open_ones:
        raise LabError("no cluster is open that a program could use", "labkit.start() one first")
    if old is not None and old.alive:
        old.kill()
    program = shell.user_ns[name] = Program(open_ones[-1], name, cell)
    if in_notebook():  # a terminal cannot be written to without disturbing what is typed
        from IPython.display import display

        handle = display({"text/plain": ""}, raw=True, display_id=True)
        threading.Thread(target=program._follow, args=[handle], daemon=True).start()


def register() -> None:
    """Make %%spawn known, if this is IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is not None:
        shell.register_magic_function(spawn, "cell", "spawn")
