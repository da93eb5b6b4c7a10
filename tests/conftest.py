"""What all tests share: a workspace of their own, a cluster, and a word on what was not tested."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

# Before labkit is imported anywhere: tests never touch the learner's workspace or its cluster.
_workspace = tempfile.TemporaryDirectory(prefix="labkit-tests-")
os.environ["LABKIT_WORKSPACE"] = _workspace.name
os.environ.setdefault("LABKIT_GRACE", "3")

# A background job ignores Ctrl-C, one under nohup a hang-up: the processes under test must not.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

import labkit  # noqa: E402

not_tested: list[str] = []


@pytest.fixture(scope="session")
def cluster() -> Iterator[labkit.Cluster]:
    """Three brokers for all tests that only look and use names of their own."""
    with labkit.start(brokers=3, name="shared") as cluster:
        yield cluster


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    """A topic name that no other test uses."""
    return request.node.name.replace("[", "-").replace("]", "")[:80] + f".{os.urandom(3).hex()}"


def processes_of(folder: Path) -> list[psutil.Process]:
    """List the living processes that run in a folder or have it in their command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "cwd", "status"]):
        words = [*(process.info["cmdline"] or []), process.info["cwd"] or ""]
        if any(str(folder) in word for word in words) and process.info["status"] != "zombie":
            found.append(process)
    return found


def pytest_unconfigure(config: pytest.Config) -> None:
    for what in sorted(set(not_tested)):
        print(f"NOT TESTED: {what}")
