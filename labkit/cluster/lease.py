"""Labs on this machine: where they live, who holds them, and how to reach their guards."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from labkit import runtime
from labkit.cluster import guard
from labkit.errors import LabError


def grace() -> float:
    """Return how many seconds a lab outlives its last holder: enough for a kernel to restart."""
    return float(os.environ.get("LABKIT_GRACE", "8"))


class Lease:
    """A connection to a lab's guard; while it is open and held, the lab lives."""

    def __init__(self, connection: socket.socket, folder: Path) -> None:
        self.folder = folder
        self._connection = connection
        self._connection.settimeout(20)
        self._lines = connection.makefile("rb")
        self._lock = threading.Lock()  # button callbacks come from threads of their own
        self._asked = 0

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """Have the guard do something and return its status after that."""
        with self._lock:
            self._asked += 1
            answer: dict[str, Any] = {}
            try:
                request |= {"do": do, "turn": self._asked}
                self._connection.sendall(json.dumps(request).encode() + b"\n")
                while answer.get("turn") != self._asked:  # skip what Ctrl-C left unread
                    answer = json.loads(self._lines.readline())
            except (OSError, ValueError):
                raise LabError(
                    "this cluster is gone: its guard does not answer, and brokers end with it",
                    "start a new one with labkit.start()",
                ) from None
        if "No space left" in answer.get("error", ""):
            raise runtime.no_space(self.folder)
        if "error" in answer:
            raise LabError(
                f"the guard could not do that: {answer['error']}",
                "start a new cluster with labkit.start(fresh=True)",
            )
        return answer

    def hold(self) -> None:
        """Keep the lab alive for as long as this process lives or until ``release``."""
        self.ask("hold", pid=os.getpid(), who=_who())

    def release(self) -> None:
        """Let go of the lab without ending it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def end(self) -> None:
        """End the lab: kill its processes, remove its data, and wait until that is done."""
        with contextlib.suppress(LabError):
            self.ask("close")
        self.release()
        deadline = time.monotonic() + 20
        while is_alive(self.folder) and time.monotonic() < deadline:
            time.sleep(0.01)

    def others(self) -> list[str]:
        """Name the other processes that hold this lab."""
        holders = self.ask("status")["holders"]
        return [holder["who"] for holder in holders if holder["pid"] != os.getpid()]


def _who() -> str:
    notebook = os.environ.get("JPY_SESSION_NAME")
    what = f"the kernel of {Path(notebook).name}" if notebook else psutil.Process().name()
    return f"pid {os.getpid()} ({what})"


def labs() -> Path:
    """Return the folder in which every lab has its own."""
    return runtime.home() / "labs"


def lab_folder(name: str) -> Path:
    """Return the folder of this workspace's lab of that name."""
    mark = hashlib.sha256(str(runtime.workspace().resolve()).encode()).hexdigest()[:8]
    return labs() / f"{name}-{mark}"


def _address(folder: Path) -> str:
    # A Unix socket's path must be short, which a cache folder's need not be.
    mark = hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16]
    sockets = Path(tempfile.gettempdir()) / f"labkit-{os.getuid()}"
    sockets.mkdir(mode=0o700, exist_ok=True)
    if sockets.stat().st_uid != os.getuid():
        raise LabError(f"{sockets} belongs to someone else", "set TMPDIR to a folder of your own")
    return str(sockets / mark)


def attach(folder: Path) -> Lease | None:
    """Connect to the guard of a lab, or return None if there is none."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(5)
    try:
        connection.connect(_address(folder))
    except OSError:
        connection.close()
        return None
    return Lease(connection, folder)


def is_alive(folder: Path) -> bool:
    """Tell whether a lab's guard lives: it has the lab's file locked as long as it does."""
    try:
        with (folder / "guard.lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def launch(folder: Path) -> Lease:
    """Start a guard for a new lab and hold it."""
    runtime.make_folder(folder)
    try:
        return _launch(folder)
    except (OSError, LabError):  # there is no guard that would remove it
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _launch(folder: Path) -> Lease:
    ours, theirs = socket.socketpair()
    with (folder / "guard.lock").open("w") as lock, theirs, (folder / "guard.log").open("w") as log:
        # Taken here and inherited by the guard: a sweep never sees the lab of a guard that starts.
        fcntl.flock(lock, fcntl.LOCK_EX)
        argv = [
            sys.executable,
            "-I",
            "-S",
            guard.__file__,
            str(folder),
            _address(folder),
            str(theirs.fileno()),
            str(lock.fileno()),
            str(grace()),
        ]
        subprocess.Popen(
            argv,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(theirs.fileno(), lock.fileno()),
            cwd=folder,
        )
    lease = Lease(ours, folder)
    try:
        lease.hold()
    except LabError:
        why = (folder / "guard.log").read_text().strip() or "it printed nothing"
        raise LabError(
            f"the lab's guard did not start: {why.splitlines()[-1]}", "run `labkit doctor`"
        ) from None
    return lease


def sweep() -> None:
    """Remove what labs left behind whose guards were killed."""
    for folder in labs().glob("*-*"):
        if not is_alive(folder):
            with contextlib.suppress(OSError):
                os.unlink(_address(folder))
            shutil.rmtree(folder, ignore_errors=True)
