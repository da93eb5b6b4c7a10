"""What all tests of errors check: the two lines, in time, and that nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from labkit import LabError
from labkit.cluster import lease

HANG = 90  # seconds: no error may be waited for this long; it is not a measure of speed


@contextlib.contextmanager
def lab_error(what: str, to_do: str) -> Iterator[None]:
    """Expect a LabError whose two parts match, with no lower-level trace behind it."""
    with pytest.raises(LabError) as caught:
        yield
    error = caught.value
    assert re.search(what, error.what) and "\n" not in error.what, error.what
    assert re.search(to_do, error.to_do), error.to_do
    assert str(error) == f"{error.what}\n{error.to_do}"
    assert error.__cause__ is None and (error.__suppress_context__ or not error.__context__)


def wait_until(condition: Callable[[], Any]) -> Any:
    """Return the condition's value once it is true, or the last one when time is up."""
    deadline = time.monotonic() + HANG / 3
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return value


def files(folder: Path) -> set[str]:
    """List what is below a folder, but for locks and the folders that have a place for good."""
    found = folder.rglob("*") if folder.is_dir() else []
    lasting = {"lock", "jars", "labs", f"labkit-{os.getuid()}"}
    # A cache may be in the making, in the background, for another test's cluster.
    return {str(path) for path in found if path.name not in lasting and "aot" not in path.parts}


def traces() -> set[str]:
    """List what labkit has of ours on this machine: processes, labs, sockets, temporary files."""
    mark = lease.lab_folder("").name  # of our workspace: others have labs in this home, too
    children = psutil.Process().children(recursive=True)
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            text = " ".join([*process.cmdline(), process.cwd()])
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if lab := re.search(rf"/labs/(\w+{mark})", text):
                found.add(f"processes of {lab[1]}")
            elif process in children:
                found.add(f"process {process.pid}: {text}")
    found |= {str(path) for path in lease.labs().glob(f"*{mark}")}
    return found | files(Path(tempfile.gettempdir()))


@pytest.fixture(scope="module", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Put sockets and temporary files where no one else has any."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("tmp")
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", str(folder))
        yield


@pytest.fixture(autouse=True)
def nothing_is_left_behind(temporary_folder: None) -> Iterator[None]:
    """Compare the traces before and after the test, which must not hang."""

    def hangs(*_: object) -> None:
        pytest.fail(f"no answer within {HANG} s")

    before = traces()
    old = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(HANG)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, old)
    assert wait_until(lambda: traces() <= before), traces() - before
