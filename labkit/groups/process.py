"""A process that a lab's guard runs for us, so that it can be killed and never outlives the lab."""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from labkit.cluster.lease import Lease
from labkit.cluster.tools import Text
from labkit.errors import LabError

TAIL = 1_000_000  # bytes of a log that are worth reading
NEXT = {"frozen": "thaw it first, or kill it", "running": "it is running as it should"}


def wait_until(problem: Callable[[], str], timeout: float, to_do: str) -> None:
    """Wait until nothing is the matter; in the end, say what still is."""
    deadline = time.monotonic() + timeout
    while text := problem():
        if time.monotonic() > deadline:
            raise LabError(f"after {timeout:g} s, {text}", to_do)
        time.sleep(0.05)


def free(lease: Lease, names: list[str], what: str) -> None:
    """End processes that an earlier kernel has left in this lab, but not another kernel's."""
    processes = lease.ask("status")["processes"]
    living = [name for name in names if processes.get(name, {}).get("state", "dead") != "dead"]
    if living and (others := lease.others()):
        raise LabError(f"{what} is already run by {', '.join(others)}", "give yours another name")
    for name in living:
        lease.ask("signal", name=name, number=signal.SIGKILL)


class Process:
    """A process by the name that the guard knows it by."""

    def __init__(self, lease: Lease, id: str, name: str) -> None:
        self.name = name
        self._exit: int | None = None
        self._lease, self._id = lease, id
        self._log = lease.folder / f"{id}.log"
        self._last = ""

    def _spawn(self, argv: list[str], cwd: Path) -> None:
        self._log.unlink(missing_ok=True)
        self._lease.ask("spawn", name=self._id, argv=argv, log=str(self._log), cwd=str(cwd))
        self._exit = None

    def _status(self) -> dict[str, Any]:
        status: dict[str, Any] = self._lease.ask("status")["processes"][self._id]
        self._exit = status["exit"]
        return status

    @property
    def pid(self) -> int:
        """The number that the system gave the process."""
        return int(self._status()["pid"])

    @property
    def state(self) -> str:
        """How the process is: running, frozen or dead."""
        try:
            return str(self._status()["state"])
        except LabError:
            return "dead"  # its guard is gone, and with it all the lab

    @property
    def alive(self) -> bool:
        """Whether the process has not ended; a frozen one has not."""
        return self.state != "dead"

    @property
    def exit_code(self) -> int | None:
        """The code that the process has ended with; minus the number of the signal if by one."""
        ended = not self.alive
        return -signal.SIGKILL if ended and self._exit is None else self._exit  # None: by the lab

    @property
    def output(self) -> Text:
        """What the process has printed, errors too; of very much, the end."""
        with contextlib.suppress(FileNotFoundError), self._log.open("rb") as log:
            log.seek(max(0, log.seek(0, 2) - TAIL))
            self._last = log.read().decode(errors="replace")
        return Text(self._last)

    def kill(self) -> None:
        """End the process as a power cut would (SIGKILL)."""
        self._signal("kill", signal.SIGKILL, ("running", "frozen"))

    def freeze(self) -> None:
        """Stop the process in its tracks (SIGSTOP): it is there and does nothing."""
        self._signal("freeze", signal.SIGSTOP, ("running",))
        process = psutil.Process(self.pid)
        wait_until(
            lambda: "" if process.status() == psutil.STATUS_STOPPED else f"{self.name} runs on",
            5,
            "try again",
        )

    def thaw(self) -> None:
        """Let a frozen process go on (SIGCONT)."""
        self._signal("thaw", signal.SIGCONT, ("frozen",))

    def stop(self, within: float = 10) -> None:
        """Ask the process to end (SIGTERM), and kill it if it has not ended in time."""
        self._signal("stop", signal.SIGTERM, ("running",))
        try:
            wait_until(lambda: f"{self.name} runs on" if self.alive else "", within, "")
        except LabError:
            with contextlib.suppress(LabError):  # it may end just now
                self.kill()

    def _signal(self, verb: str, number: int, allowed: tuple[str, ...]) -> None:
        state = self.state
        if state not in allowed:
            to_do = NEXT.get(state, "start it again")
            raise LabError(f"cannot {verb} {self.name!r}: it is {state}", to_do)
        self._lease.ask("signal", name=self._id, number=number)
