"""%%spawn runs a cell as a program of its own, to be read, killed and frozen like one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import nbformat
import psutil
import pytest
from IPython.core.interactiveshell import InteractiveShell
from nbclient import NotebookClient

import labkit
from labkit.cluster.lease import lab_folder
from labkit.groups import Program, spawn
from tests.integration.test_cluster import create, send
from tests.integration.test_orphans import wait_for, wait_until_gone

FOREVER = "import time\nprint('begun', flush=True)\nwhile True:\n    time.sleep(0.1)\n"


@pytest.fixture
def shell(cluster: labkit.Cluster) -> Iterator[InteractiveShell]:
    """An IPython in which labkit is known; its programs end with the test."""
    shell = InteractiveShell.instance()
    spawn.register()
    yield shell
    for value in list(shell.user_ns.values()):
        if isinstance(value, Program) and value.alive:
            value.kill()
    shell.reset()
    InteractiveShell.clear_instance()


def run(shell: InteractiveShell, name: str, cell: str) -> Program:
    shell.run_cell_magic("spawn", name, cell)
    program: Program = shell.user_ns[name.strip()]
    return program


def test_a_program_is_given_bootstrap_and_its_output_can_be_read(shell, cluster, topic):
    create(cluster, topic, partitions=1)
    send(cluster, topic, range(3), acks="all")
    cell = (
        "from kafka import KafkaConsumer\n"
        f"for record in KafkaConsumer({topic!r}, auto_offset_reset='earliest',\n"
        "                            bootstrap_servers=BOOTSTRAP, consumer_timeout_ms=4000):\n"
        "    print(record.value.decode())\n"
        "    if record.offset == 2: break\n"
    )
    reader = run(shell, "reader", cell)
    assert "running" in repr(reader)
    assert reader.wait() == 0
    assert reader.output.splitlines() == ["0", "1", "2"]
    assert repr(reader.output) == str(reader.output)
    assert repr(reader) == "program 'reader': ended with exit code 0"


def test_a_program_is_killed_frozen_thawed_and_stopped(shell):
    shipper = run(shell, "shipper", FOREVER)
    wait_for(lambda: shipper.output == "begun\n")
    shipper.freeze()
    wait_for(lambda: psutil.Process(shipper.pid).status() == psutil.STATUS_STOPPED)
    assert shipper.alive
    assert "frozen" in repr(shipper)
    shipper.thaw()
    with pytest.raises(labkit.LabError, match=r"after 0.1 s, 'shipper' is running\n.*kill"):
        shipper.wait(timeout=0.1)
    shipper.kill()
    assert not shipper.alive and shipper.exit_code == -9 and shipper.wait() == -9
    with pytest.raises(labkit.LabError, match="cannot kill 'shipper': it is dead"):
        shipper.kill()
    shipper = run(shell, "shipper", FOREVER)
    shipper.stop()
    assert not shipper.alive and shipper.exit_code == -15


def test_running_the_cell_again_ends_the_program_before(shell):
    first = run(shell, "shipper", FOREVER)
    pid = first.pid
    second = run(shell, "shipper", FOREVER)
    assert second.pid != pid and not psutil.pid_exists(pid) and second.alive


def test_a_traceback_counts_lines_as_the_cell_does_and_shows_no_more_than_it(shell):
    broken = run(shell, "broken", "x = 1\nx / 0\n")
    assert broken.wait() == 1
    lines = broken.output.splitlines()
    assert lines[0].startswith("Traceback") and "line 3" in lines[1] and "x / 0" in lines[2]
    assert lines[-1] == "ZeroDivisionError: division by zero"
    broken = run(shell, "broken", "x = 1\nx = = 2\n")
    assert broken.wait() == 1 and "line 3\n    x = = 2" in broken.output


BAD: list[tuple[str, str, str, str]] = [
    ("", "pass", "'' cannot be the name of a program", "%%spawn shipper"),
    ("my-shop", "pass", "'my-shop' cannot be the name", "%%spawn shipper"),
    ("class", "pass", "'class' cannot be the name", "%%spawn shipper"),
    ("taken", "pass", "'taken' already names a int", "another name"),
]


def test_what_cannot_be_spawned_is_refused(shell, cluster):
    shell.user_ns["taken"] = 5
    before = cluster._lease.ask("status")["processes"]
    for name, cell, what, to_do in BAD:
        with pytest.raises(labkit.LabError, match=what) as caught:
            shell.run_cell_magic("spawn", name, cell)
        assert to_do in caught.value.to_do
        assert cluster._lease.ask("status")["processes"] == before


def test_without_a_cluster_there_is_nothing_to_run_it_for(shell, monkeypatch):
    monkeypatch.setattr("labkit.cluster._held", {})
    with pytest.raises(labkit.LabError, match=r"no cluster is open.*\n.*labkit.start"):
        shell.run_cell_magic("spawn", "shop", "pass")


def test_in_a_notebook_output_streams_under_the_cell_and_nothing_outlives_the_kernel():
    cells = [
        "import labkit\ncluster = labkit.start(brokers=1, name='spawned', fresh=True)",
        "%%spawn counter\nimport time\nfor i in range(300): print('line', i)\ntime.sleep(600)",
        "import time\nwhile 'line 299' not in counter.output: time.sleep(0.05)\ntime.sleep(1)",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells])
    client = NotebookClient(notebook, timeout=60, kernel_name="python3")
    with client.setup_kernel():
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
        outputs: list[Any] = notebook.cells[1].outputs
        assert len(outputs) == 1
        shown = outputs[0]["data"]["text/plain"].splitlines()
        assert shown[-1] == "line 299" and len(shown) == 200
    wait_until_gone(lab_folder("spawned"))
