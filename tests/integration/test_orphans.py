"""No orphans, ever: whoever dies, in whatever way, at whatever moment, nothing stays behind."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import labkit
from labkit.cluster import guard
from labkit.cluster.lease import lab_folder, labs
from tests.conftest import processes_of

GRACE = 1.0
HOLD = """
import labkit, sys
cluster = labkit.start({options})
print(cluster.bootstrap, flush=True)
sys.stdin.read()
"""


def holder(options: str, **popen: object) -> subprocess.Popen[str]:
    """Start a process that holds a cluster, as a kernel does."""
    return subprocess.Popen(
        [sys.executable, "-c", HOLD.format(options=options)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"LABKIT_GRACE": str(GRACE)},
        **popen,  # type: ignore[call-overload]
    )


def guards(folder: Path) -> list[psutil.Process]:
    return [p for p in processes_of(folder) if guard.__file__ in p.cmdline()]


def wait_until_gone(folder: Path, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while left := processes_of(folder):
        assert time.monotonic() < deadline, f"still there: {[p.cmdline()[:3] for p in left]}"
        time.sleep(0.05)


def wait_for(condition, seconds: float = 30):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return value


def cycles(count: int, seed: int) -> None:
    """Kill the parent, and in every third cycle the guard too, at a random moment of a start."""
    chance = random.Random(seed)
    reached = {"before the guard": 0, "starting": 0, "up": 0}
    for cycle in range(count):
        name = f"orphan{cycle}"
        folder = lab_folder(name)
        parent = holder(f"brokers={chance.choice([1, 1, 3])}, name={name!r}")
        time.sleep(chance.uniform(0.3, 4.0))
        running = guards(folder)
        up = bool(select.select([parent.stdout], [], [], 0)[0])
        reached["up" if up else "starting" if running else "before the guard"] += 1
        victims = [parent, *(running if cycle % 3 == 0 else [])]
        chance.shuffle(victims)
        for victim in victims:
            victim.kill()
        parent.wait()
        parent.stdout.close(), parent.stdin.close()
        wait_until_gone(folder)
    print(f"killed: {reached}")
    with labkit.start(brokers=1, name="next"):
        assert [f.name for f in labs().glob("orphan*")] == []


def test_a_dozen_random_kills_leave_nothing():
    cycles(12, seed=5)


@pytest.mark.soak
def test_two_hundred_random_kills_leave_nothing():
    cycles(200, seed=1)


def test_a_restarted_kernel_finds_its_cluster_again():
    first = holder("brokers=1, name='again'")
    bootstrap = first.stdout.readline()
    first.kill()
    second = holder("name='again'")
    assert second.stdout.readline() == bootstrap
    time.sleep(GRACE * 2)  # what the first one's death began must not go on
    assert guards(lab_folder("again"))
    second.kill()
    wait_until_gone(lab_folder("again"))
    assert not lab_folder("again").exists()


def test_a_guard_that_is_killed_takes_its_brokers_along_and_start_begins_anew():
    cluster = labkit.start(brokers=1, name="unguarded")
    (watcher,) = guards(lab_folder("unguarded"))
    watcher.kill()
    wait_until_gone(lab_folder("unguarded"))
    with pytest.raises(labkit.LabError, match="gone"):
        cluster.nodes()
    with labkit.start(brokers=1, name="unguarded") as new:
        assert new is not cluster
        assert new.nodes().state.tolist() == ["running"]


def test_ctrl_c_during_start_leaves_nothing():
    folder = lab_folder("interrupted")
    process = holder("brokers=3, name='interrupted'")
    wait_for(lambda: len(processes_of(folder)) > 1)  # a broker is on its way
    process.send_signal(signal.SIGINT)
    process.wait(20)
    wait_until_gone(folder)
    assert not folder.exists()


@pytest.mark.parametrize("end, code", [(signal.SIGHUP, -signal.SIGHUP), (signal.SIGINT, 130)])
def test_a_closed_terminal_or_ctrl_c_ends_what_labkit_start_holds(end, code):
    folder = lab_folder("terminal")
    argv = [sys.executable, "-m", "labkit.cli", "start", "--brokers", "1", "--name", "terminal"]
    environment = os.environ | {"LABKIT_GRACE": str(GRACE)}
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert "1 broker" in process.stdout.readline()
        process.send_signal(end)
        assert process.wait(20) == code
    finally:
        process.kill()
    wait_until_gone(folder)
    assert not folder.exists()


def test_where_no_signal_does_it_a_pipe_ends_the_process():
    program = (
        "import subprocess, sys; from labkit.cluster import guard\n"
        "child = subprocess.Popen(['sleep', '600'])\n"
        "guard.watch_over(child); print(child.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    child = psutil.Process(int(parent.stdout.readline()))
    assert child.is_running()
    parent.kill()
    parent.wait()
    child.wait(10)
