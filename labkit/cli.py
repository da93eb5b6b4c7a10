"""The command line: labkit lab, start, status, stop, run, doctor, progress, restore."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

from labkit.errors import LabError

EPILOG = """examples:
  labkit lab                            open JupyterLab on the course
  labkit start --brokers 3              a cluster for this terminal, until Ctrl-C
  labkit run kafka-topics --list        a Kafka tool, against the running cluster
  labkit doctor                         is everything here that a lesson needs?
"""


def main(argv: list[str] | None = None) -> int:
    """Run a command and return its exit code: 0 done, 1 could not, 2 misused, 130 interrupted."""
    arguments = _parser().parse_args(argv)
    try:
        return int(arguments.command(arguments) or 0)
    except LabError as error:
        print(f"labkit: {error.what}\n  {error.to_do}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:  # as in `labkit status | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="labkit",
        description="A Kafka lab: start a real cluster, break it, watch it, learn.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(metavar="command", required=True)

    def command(name: str, function: Any, help: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=help, description=f"{help[0].upper()}{help[1:]}.")
        added.set_defaults(command=function)
        return added

    lab = command("lab", _lab, "prepare the workspace and open JupyterLab on the course")
    lab.add_argument("--port", type=int, help="JupyterLab's port (a free one from 8888 on)")
    lab.add_argument(
        "--no-browser", action="store_true", help="only print the address, open nothing"
    )

    start = command(
        "start", _start, "start a cluster, or heal the running one, and hold it until Ctrl-C"
    )
    start.add_argument("--brokers", type=int, help="how many brokers (3)")
    start.add_argument("--controllers", type=int, help="so many controllers of their own")
    start.add_argument("--port", type=int, help="the first broker's port (free ones)")
    start.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="a setting for every broker; may be given again",
    )
    start.add_argument(
        "--fresh", action="store_true", help="an empty one in place of the running one"
    )
    _name(start)

    status = command("status", _status, "show the clusters that run, and who holds them")
    status.add_argument("--json", action="store_true", help="for programs")

    _name(command("stop", _stop, "end a cluster of this workspace, whoever holds it"))

    run = command("run", _run, "run one of Kafka's tools against the running cluster")
    _name(run)
    run.add_argument("tool", help="for example kafka-topics")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="what the tool takes")

    command(
        "doctor", _doctor, "check that everything is here that a lesson needs, and say what to fix"
    )
    command("progress", _progress, "show what you have solved so far")
    restore = command("restore", _restore, "give a fresh copy of a lesson; yours is kept beside it")
    restore.add_argument("lesson", help="its number, for example 02")
    return parser


def _name(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--name", default="lab", help="which cluster (lab)")


def _lab(arguments: argparse.Namespace) -> None:
    from labkit import course, runtime

    for part in ("kafka", "spark"):
        runtime.jars(part)
    workspace = course.prepare_workspace()
    first = course.lessons()[0].path.name
    ours = Path(__file__).parent / "jupyter"
    paths = [str(ours), *filter(None, [os.environ.get("JUPYTER_CONFIG_PATH")])]
    # A terminal in JupyterLab knows the command `labkit`, as the lessons promise.
    programs = [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    environment = os.environ | {
        "JUPYTER_CONFIG_PATH": os.pathsep.join(paths),
        "PATH": os.pathsep.join(programs),
        "LABKIT_WORKSPACE": str(workspace),
    }
    argv = [
        sys.executable,
        "-P",  # a file called like one of its modules, where we happen to be, is not meant
        "-m",
        "jupyterlab",
        "--ServerApp.ip=127.0.0.1",
        f"--ServerApp.root_dir={workspace}",
        f"--LabApp.default_url=/lab/tree/{first}",
        # A closed browser leaves kernels behind: half an hour later they and their clusters go.
        "--MappingKernelManager.cull_idle_timeout=1800",
        "--MappingKernelManager.cull_interval=60",
    ]
    if arguments.port is not None:
        argv += [f"--ServerApp.port={arguments.port}", "--ServerApp.port_retries=0"]
    if arguments.no_browser:
        argv.append("--no-browser")
    if os.geteuid() == 0:
        argv.append("--allow-root")
    print(f"Your copies of the lessons are in {workspace}", flush=True)
    os.execve(sys.executable, argv, environment)


def _start(arguments: argparse.Namespace) -> None:
    import labkit

    config = {}
    for pair in arguments.config:
        key, equals, value = pair.partition("=")
        if not equals:
            raise LabError(f"--config {pair} has no value", "write it as KEY=VALUE")
        config[key] = value
    cluster = labkit.start(
        arguments.brokers,
        controllers=arguments.controllers,
        port=arguments.port,
        config=config or None,
        fresh=arguments.fresh,
        name=arguments.name,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        print(repr(cluster))
        print(f"bootstrap: {cluster.bootstrap}\nCtrl-C ends it.", flush=True)
        while True:
            time.sleep(1)
            cluster._lease.ask("status")  # an error once `labkit stop` has ended the cluster
    finally:
        cluster.close()


def _labs() -> list[dict[str, Any]]:
    from labkit.cluster import lease as leases

    found = []
    for folder in sorted(leases.labs().glob("*-*")):
        lease = leases.attach(folder)
        if lease is None:
            continue
        try:
            status = lease.ask("status")
        except LabError:
            continue  # it ended at this moment
        finally:
            lease.release()
        meta = status["meta"]
        if "nodes" not in meta:
            continue  # it is being planned at this moment
        nodes = [
            {
                "id": node["id"],
                "roles": node["roles"],
                "address": f"127.0.0.1:{node['port']}" if node["port"] else "",
                "state": status["processes"].get(f"node-{node['id']}", {}).get("state", "dead"),
                "pid": status["processes"].get(f"node-{node['id']}", {}).get("pid"),
            }
            for node in meta["nodes"]
        ]
        found.append(
            {
                "name": meta["name"],
                "workspace": meta["workspace"],
                "guard": status["pid"],
                "bootstrap": ",".join(n["address"] for n in nodes if n["address"]),
                "nodes": nodes,
                "holders": [holder["who"] for holder in status["holders"]],
            }
        )
    return found


def _status(arguments: argparse.Namespace) -> None:
    labs = _labs()
    if arguments.json:
        print(json.dumps(labs, indent=2))
        return
    if not labs:
        print("no cluster is running; `labkit start` starts one")
    for lab in labs:
        states = ", ".join(f"{node['id']} {node['state']}" for node in lab["nodes"])
        print(
            f"{lab['name']}  {lab['bootstrap']}\n  nodes: {states}\n"
            f"  held by: {', '.join(lab['holders']) or 'nobody, it ends in seconds'}\n"
            f"  workspace: {lab['workspace']}"
        )


def _attached(name: str) -> Any:
    from labkit.cluster import lease as leases

    lease = leases.attach(leases.lab_folder(name))
    if lease is None:
        raise LabError(
            f"no cluster {name!r} is running in this workspace",
            "start one: `labkit start`, or labkit.start() in a notebook",
        )
    return lease


def _stop(arguments: argparse.Namespace) -> None:
    lease = _attached(arguments.name)
    holders = [holder["who"] for holder in lease.ask("status")["holders"]]
    lease.end()
    print(
        f"stopped {arguments.name}"
        + (f", which was held by {', '.join(holders)}" if holders else "")
    )


def _run(arguments: argparse.Namespace) -> None:
    from labkit.cluster.embedded import EmbeddedCluster
    from labkit.cluster.tools import main_class

    main_class(arguments.tool)  # before reading what may never end
    cluster = EmbeddedCluster(_attached(arguments.name), arguments.name)
    input = None if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    command = shlex.join([arguments.tool, *arguments.arguments])
    print(cluster.run(command, input, timeout=3600))


def _doctor(arguments: argparse.Namespace) -> int:
    from labkit import doctor

    return doctor.run()


def _progress(arguments: argparse.Namespace) -> None:
    from labkit import course

    print(course.progress().to_string(index=False))


def _restore(arguments: argparse.Namespace) -> None:
    from labkit import course

    print(course.restore(arguments.lesson))


if __name__ == "__main__":
    sys.exit(main())
