"""The guard: one single-threaded process that owns a lab's processes and ends them with the lab.

It is run as a script, with the standard library only, so that it starts in milliseconds. It
listens on a Unix socket for lines of JSON. A connection that said ``hold`` keeps the lab alive;
when the last one is gone for a few seconds, because its process ended in whatever way, the guard
kills everything and removes the data. Should the guard itself be killed, its processes die with
it (see ``tether``).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

TICK = 0.1  # seconds between two looks at the children and at the clock

LINUX = sys.platform == "linux"
_prctl = ctypes.CDLL(None).prctl if LINUX else None


def tether(argv: list[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a process that does not outlive the thread that calls this."""
    parent = os.getpid()

    def die_with_parent() -> None:
        assert _prctl is not None
        _prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # it died before we could ask
            os._exit(1)

    process = subprocess.Popen(argv, preexec_fn=die_with_parent if LINUX else None, **options)
    if not LINUX:
        watch_over(process)
    return process


def watch_over(process: subprocess.Popen[Any]) -> None:
    """Kill a process when ours ends, where the system has no signal for that: a pipe that ends."""
    end, ours = os.pipe()  # `ours` is closed by the system when this process ends, in whatever way
    script = f"read _; kill -9 {process.pid} 2>/dev/null"
    subprocess.Popen(["/bin/sh", "-c", script], stdin=end, start_new_session=True)
    os.close(end)
    _pipes.append(ours)


_pipes: list[int] = []


class Guard:
    """The processes of one lab, who holds it, and the loop that serves them."""

    def __init__(self, folder: Path, address: str, first: socket.socket, grace: float) -> None:
        self.folder, self.address, self.grace = folder, address, grace
        self.meta: dict[str, Any] = {}
        self.processes: dict[str, subprocess.Popen[Any]] = {}
        self.frozen: set[str] = set()
        self.holders: dict[socket.socket, dict[str, Any]] = {}
        self.unread: dict[socket.socket, bytes] = {}
        self.released_at = time.monotonic()
        self.closing = False
        self.selector = selectors.DefaultSelector()
        self.server = socket.socket(socket.AF_UNIX)
        self.server.bind(address)
        self.server.listen(16)
        self.selector.register(self.server, selectors.EVENT_READ)
        self._admit(first)

    def serve(self) -> None:
        """Answer until closed, or until nobody has held the lab for as long as the grace."""
        while not self.closing:
            for key, _ in self.selector.select(TICK):
                connection = key.fileobj
                assert isinstance(connection, socket.socket)
                if connection is self.server:
                    self._admit(self.server.accept()[0])
                else:
                    self._read(connection)
            for process in self.processes.values():
                process.poll()  # reap, so that no zombie is taken for alive
            if not self.holders and time.monotonic() - self.released_at > self.grace:
                break

    def end(self) -> None:
        """Kill every process, then remove the lab's files."""
        # Out of reach first: whoever connects from now on finds no lab rather than a dying one.
        with contextlib.suppress(OSError):
            os.unlink(self.address)
        for process in self.processes.values():
            process.kill()  # a frozen one too: SIGKILL does not wait for SIGCONT
        for process in self.processes.values():
            process.wait()
        # In one step, so that a new lab of this name never finds half of the old one.
        gone = self.folder.with_name(f"{self.folder.name}.ended-{os.getpid()}")
        with contextlib.suppress(OSError):
            self.folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _admit(self, connection: socket.socket) -> None:
        connection.setblocking(True)
        self.unread[connection] = b""
        self.selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(65536)
        except OSError:
            data = b""
        if not data:
            return self._release(connection)
        *lines, self.unread[connection] = (self.unread[connection] + data).split(b"\n")
        for line in lines:
            request = json.loads(line)
            turn = request.pop("turn")
            try:
                answer = self._answer(connection, request)
            except Exception as error:  # a bad request must not take the brokers down with it
                answer = {"error": f"{type(error).__name__}: {error}"}
            try:
                connection.sendall(json.dumps(answer | {"turn": turn}).encode() + b"\n")
            except OSError:
                return self._release(connection)

    def _release(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        connection.close()
        self.unread.pop(connection, None)
        if self.holders.pop(connection, None) is not None:
            self.released_at = time.monotonic()

    def _answer(self, connection: socket.socket, request: dict[str, Any]) -> dict[str, Any]:
        do = request.pop("do")
        handlers: dict[str, Callable[..., None]] = {
            "spawn": self._spawn,
            "signal": self._signal,
            "set": self.meta.update,
            "status": lambda: None,
            "close": self._close,
        }
        if do == "hold":
            self.holders[connection] = request
        else:
            handlers[do](**request)
        return self._status()

    def _spawn(self, name: str, argv: list[str], log: str, cwd: str, nice: int = 0) -> None:
        old = self.processes.get(name)
        if old is not None and old.poll() is None:
            raise ValueError(f"{name} is already running as pid {old.pid}")
        with open(log, "ab") as output:
            self.processes[name] = tether(
                ["nice", "-n", str(nice), *argv] if nice else argv,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=cwd,
            )
        self.frozen.discard(name)

    def _signal(self, name: str, number: int) -> None:
        process = self.processes[name]
        process.send_signal(number)
        if number == signal.SIGSTOP:
            self.frozen.add(name)
        elif number == signal.SIGCONT:
            self.frozen.discard(name)
        elif number == signal.SIGKILL:
            process.wait()  # at once but for a moment: then the answer already says "dead"

    def _close(self) -> None:
        self.closing = True

    def _status(self) -> dict[str, Any]:
        return {
            "pid": os.getpid(),
            "meta": self.meta,
            "holders": list(self.holders.values()),
            "processes": {
                name: {"pid": process.pid, "exit": process.poll(), "state": self._state(name)}
                for name, process in self.processes.items()
            },
        }

    def _state(self, name: str) -> str:
        if self.processes[name].poll() is not None:
            return "dead"
        return "frozen" if name in self.frozen else "running"


def main() -> None:
    """Guard the lab in a folder for whoever is at the other end of an inherited socket."""
    folder, address, first, lock, grace = sys.argv[1:]
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(
            number, signal.SIG_IGN
        )  # Ctrl-C and a closed terminal are the holders' affair
    guard = Guard(Path(folder), address, socket.socket(fileno=int(first)), float(grace))
    os.set_inheritable(int(lock), False)  # the lock says that the guard lives: not for the brokers
    signal.signal(signal.SIGTERM, lambda *_: guard._close())
    try:
        guard.serve()
    finally:
        guard.end()


if __name__ == "__main__":
    main()
