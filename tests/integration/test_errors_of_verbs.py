"""Verbs and commands: each error says what to do, comes soon, and leaves nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

import labkit
from labkit.cluster import lease
from tests import conftest
from tests.integration.test_cluster import create, send
from tests.integration.traces import (
    HANG,
    lab_error,
    nothing_is_left_behind,
    temporary_folder,
    wait_until,
)

__all__ = ["nothing_is_left_behind", "temporary_folder"]  # they are for every test here


@pytest.fixture(scope="module")
def shared() -> Iterator[labkit.Cluster]:
    with labkit.start(3, name="errors", fresh=True) as cluster:
        create(cluster, "orders", partitions=1)
        send(cluster, "orders", range(3))
        yield cluster


@pytest.fixture
def cluster(shared: labkit.Cluster) -> labkit.Cluster:
    """Three brokers, healed if the test before has broken one, with three records in orders."""
    return labkit.start(name="errors")


# --- verbs ----------------------------------------------------------------------------------------

VERBS: dict[str, Callable[[Any], object]] = {
    "bootstrap": lambda cluster: cluster.bootstrap,
    "brokers": lambda cluster: cluster.brokers,
    "nodes": lambda cluster: cluster.nodes(),
    "topics": lambda cluster: cluster.topics(),
    "segments": lambda cluster: cluster.segments("orders"),
    "log": lambda cluster: cluster.log(1),
    "run": lambda cluster: cluster.run("kafka-topics --list"),
    "kill": lambda cluster: cluster.kill(1),
    "stop": lambda cluster: cluster.stop(1),
    "freeze": lambda cluster: cluster.freeze(1),
    "thaw": lambda cluster: cluster.thaw(1),
    "restart": lambda cluster: cluster.restart(1),
    "add_broker": lambda cluster: cluster.add_broker(),
    "wait_for": lambda cluster: cluster.wait_for("brokers"),
    "group": lambda cluster: cluster.group("shipping", "orders"),
    "spark": lambda cluster: cluster.spark(),
    "watch": lambda cluster: cluster.watch(),
}


def test_no_verb_is_forgotten_here():
    public = {name for name in dir(labkit.Cluster) if not name.startswith("_")}
    assert public - {"close"} == set(VERBS)


@pytest.mark.parametrize("verb", ["kill", "stop", "freeze", "thaw", "restart", "log"])
def test_an_unknown_broker(cluster, verb):
    for broker in (99, 0, -1, "1", 1.0, True, None, [1]):
        with lab_error(rf"^there is no broker {re.escape(repr(broker))}$", "has: 1, 2, 3"):
            getattr(cluster, verb)(broker)
    assert cluster.nodes().state.eq("running").all()


def test_a_broker_that_is_not_in_the_state_for_a_verb(cluster):
    with lab_error("cannot thaw broker 3: it is running", "as it should"):
        cluster.thaw(3)
    cluster.freeze(3)
    for verb in (cluster.freeze, cluster.stop):
        with lab_error(f"cannot {verb.__name__} broker 3: it is frozen", r"cluster.thaw\(3\)"):
            verb(3)
    cluster.kill(3)
    for verb in (cluster.kill, cluster.stop, cluster.freeze, cluster.thaw):
        with lab_error(f"cannot {verb.__name__} broker 3: it is dead", r"cluster.restart\(3\)"):
            verb(3)


def test_restarting_one_broker_leaves_the_other_dead_ones_dead(cluster):
    cluster.kill(3)
    cluster.restart(2)
    assert cluster.nodes().state.tolist() == ["running", "running", "dead"]


def test_an_unknown_topic(cluster):
    for look in (cluster.segments, lambda topic: cluster.wait_for("leaders", topic=topic)):
        with lab_error("no topic 'order'; did you mean 'orders'", "the topics are: .*orders"):
            look("order")
    with lab_error("after 0 s, there is no topic 'order'", "timeout="):
        cluster.wait_for("topic", topic="order", timeout=0.1)
    with lab_error("topic 'orders' has no partition 7", r"cluster.topics\(\)"):
        cluster.segments("orders", partition=7)
    with lab_error("there is no broker 0", "has: 1, 2, 3"):
        cluster.segments("orders", broker=0)
    with lab_error("no condition is called 'leader'; did you mean 'leaders'", "in-sync"):
        cluster.wait_for("leader")


@pytest.mark.parametrize(
    "command, what, to_do",
    [
        (
            "kafka-topic --list",
            "no tool is called 'kafka-topic'; did you mean 'kafka-topics'",
            "use",
        ),
        ("", "no tool is called ''", "use one of: kafka-acls"),
        ("kafka-topics '--list", "cannot read the command .+: No closing quotation", "quote it"),
        ("kafka-topics --lst", "kafka-topics failed: .*lst is not a recognized", "--help"),
        (
            "kafka-topics --describe --topic order",
            "kafka-topics failed: .*Topic 'order' does not exist",
            "exited with 1",
        ),
    ],
)
def test_a_tool_that_is_unknown_or_fails(cluster, command, what, to_do):
    with lab_error(what, to_do):
        cluster.run(command)


def test_a_tool_that_does_not_end(cluster):
    command = "kafka-console-consumer --topic orders --from-beginning"
    with lab_error("kafka-console-consumer was still running after 5 s.*: 2$", "timeout="):
        cluster.run(command, timeout=5)


def test_what_a_broker_unpacks_is_removed_with_its_lab(cluster):
    create(cluster, "packed", partitions=1)
    cluster.run("kafka-console-producer --topic packed --compression-codec lz4", input="x\n")
    folder = lease.lab_folder("errors")
    maps = [m.path for process in conftest.processes_of(folder) for m in process.memory_maps()]
    libraries = [path for path in maps if re.search(r"lz4.*\.so$", path)]
    assert libraries and all(path.startswith(f"{folder}/") for path in libraries)


def test_verbs_after_close():
    cluster = labkit.start(1, name="closed")
    cluster.close()
    for name, verb in VERBS.items():
        with lab_error("this cluster is closed", r"labkit.start\(\)"):
            print(name), verb(cluster)
    cluster.close()
    assert repr(cluster) == "Kafka cluster 'closed': closed"
    assert cluster._repr_mimebundle_() == {"text/plain": repr(cluster)}


def test_the_guard_killed_under_a_cluster():
    cluster = labkit.start(1, name="guarded")
    os.kill(cluster._lease.ask("status")["pid"], signal.SIGKILL)
    assert wait_until(lambda: not conftest.processes_of(lease.lab_folder("guarded")))
    for name, verb in VERBS.items():
        # The first are known without asking anyone; for the others, see test_watch.
        if name not in ("bootstrap", "brokers", "log", "spark", "watch"):
            with lab_error("this cluster is gone: its guard", r"labkit.start\(\)"):
                print(name), verb(cluster)
    assert "this cluster is gone" in repr(cluster)
    with labkit.start(name="guarded") as new:
        assert new is not cluster and new.topics().empty
    cluster.close()


def test_without_most_controllers_every_verb_and_table_still_returns():
    gone = r"most controllers are gone \(2, 3\)", r"labkit.start\(\) brings them back"
    with labkit.start(3, name="majority") as cluster:
        create(cluster, "orders", partitions=3)
        send(cluster, "orders", range(9), acks="all")
        cluster.kill(2), cluster.kill(3)
        assert cluster.brokers == [1, 2, 3]
        assert cluster.nodes().state.tolist() == ["running", "dead", "dead"]
        assert not cluster.nodes().active_controller.any()
        assert cluster.topics().end.isna().sum() == 2  # two leaders are dead: nobody can tell
        assert len(cluster.segments("orders")) == 9
        assert "brokers 2, 3 dead" in repr(cluster)
        assert "<svg" in cluster._repr_mimebundle_()["image/svg+xml"]
        assert cluster.log(1) and cluster.log(2)
        assert cluster.run("kafka-topics --list") == "orders"
        with lab_error("kafka-topics was still running.*" + gone[0], gone[1]):
            cluster.run("kafka-topics --create --topic more")
        with lab_error("these brokers are not up: 2, 3", "timeout="):
            cluster.wait_for("brokers", timeout=1)
        with lab_error("no broker can join; " + gone[0], gone[1]):
            cluster.add_broker()
        cluster.freeze(1)
        with lab_error("no broker is running: 1 frozen, 2 dead, 3 dead", gone[1]):
            cluster.topics()
        assert "1 frozen, 2 dead, 3 dead" in cluster._repr_mimebundle_()["text/plain"]
        cluster.thaw(1)
        with lab_error("broker 1 cannot join; " + gone[0], gone[1]):
            cluster.restart(1)
        with lab_error("no broker of .+ answered.*" + gone[0], gone[1]):
            cluster.topics()
        cluster.stop(1)
        assert cluster.nodes().state.eq("dead").all()
        assert labkit.start(name="majority") is cluster
        cluster.wait_for("in-sync")
        assert cluster.topics().end.sum() == 9
        cluster.kill(1), cluster.kill(2)  # and close() does not wait for anyone either


# --- Ctrl-C and the command line ------------------------------------------------------------------


def test_ctrl_c_during_start_leaves_nothing():
    folder = lease.lab_folder("interrupted")
    program = "import labkit; labkit.start(3, name='interrupted')"
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) as starting:
        assert wait_until(lambda: list(folder.glob("node-*.log")))
        starting.send_signal(signal.SIGINT)
        assert b"KeyboardInterrupt" in starting.stderr.read()
    assert not folder.exists()  # at once, not after the grace


INTERRUPTED = """
import labkit, psutil
cluster = labkit.start(name="errors")
try:
    cluster.run("kafka-console-consumer --topic orders", timeout=600)
except KeyboardInterrupt:
    print("left:", psutil.Process().children())
"""


def test_ctrl_c_during_run_ends_the_tool(cluster):
    argv = [sys.executable, "-c", INTERRUPTED]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as running:
        tool = wait_until(psutil.Process(running.pid).children)[0]
        assert wait_until(lambda: tool.num_threads() > 10)  # it is at work
        running.send_signal(signal.SIGINT)
        assert running.stdout.read() == "left: []\n"
    assert cluster.nodes().state.eq("running").all()


def labkit_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "labkit.cli", *arguments]
    return subprocess.run(
        argv, capture_output=True, text=True, timeout=HANG, stdin=subprocess.DEVNULL
    )


@pytest.mark.parametrize(
    "command, what, to_do",
    [
        ("run kafka-topic --list", "no tool is called 'kafka-topic'; did you", "use one of"),
        ("run kafka-topics --list", "no cluster 'lab' is running", "labkit start"),
        ("run --name errors kafka-topics --lst", "kafka-topics failed: .*lst", "--help"),
        ("stop", "no cluster 'lab' is running in this workspace", "labkit start"),
        ("start --brokers 0", "brokers=0 is not a number", "whole number"),
        ("start --config x", "--config x has no value", "KEY=VALUE"),
        ("start --name a/b", "name='a/b' is not a name", "letters"),
        ("restore 99", "there is no lesson '99'", "use one of: 00"),
    ],
)
def test_the_command_line_says_both_lines_and_exits_with_1(cluster, command, what, to_do):
    done = labkit_command(*command.split())
    first, second, *more = done.stderr.splitlines()
    assert (done.returncode, done.stdout, more) == (1, "", [])
    assert re.match(f"labkit: .*{what}", first) and re.match(f"  .*{to_do}", second), done.stderr


@pytest.mark.parametrize("command", ["", "nosuchcommand", "start --brokers three", "run"])
def test_a_misused_command_line_exits_with_2_and_says_how_to_use_it(command):
    done = labkit_command(*command.split())
    assert done.returncode == 2 and done.stderr.startswith("usage: labkit")


def test_status_for_programs_is_json(cluster):
    (lab,) = json.loads(labkit_command("status", "--json").stdout)
    assert (lab["name"], lab["bootstrap"]) == ("errors", cluster.bootstrap)
    assert [node["state"] for node in lab["nodes"]] == ["running"] * 3
    cluster.close()
    assert json.loads(labkit_command("status", "--json").stdout) == []
    assert "no cluster is running" in labkit_command("status").stdout
