"""labkit doctor: is everything here that a lesson needs, and if not, what is to be done."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from labkit import runtime
from labkit.errors import LabError

GIB = 2**30


def run() -> int:
    """Make every check, print a line each, and return 1 if one failed."""
    checks: dict[str, Callable[[], str]] = {
        "Python": _python,
        "Java": _java,
        "memory": _memory,
        "disk": _disk,
        "jars": _jars,
        "a broker": _broker,
        "Spark": _spark,
        "notebook": _notebook,
        "widgets": _widgets,
    }
    failed = 0
    for name, check in checks.items():
        try:
            print(f"ok    {name}: {check()}", flush=True)
        except LabError as error:
            failed += 1
            print(f"FAIL  {name}: {error.what}\n      → {error.to_do}", flush=True)
    print("all is well" if not failed else f"{failed} of {len(checks)} need attention")
    return 1 if failed else 0


def _python() -> str:
    found = ".".join(map(str, sys.version_info[:3]))
    if not (3, 11) <= sys.version_info[:2] <= (3, 13):
        raise LabError(
            f"this is Python {found}",
            "use 3.11, 3.12 or 3.13: make clean, make lab PYTHON=python3.12",
        )
    return found


def _java() -> str:
    path = runtime.java()
    out = subprocess.run([path, "-version"], capture_output=True, text=True, timeout=30).stderr
    return out.splitlines()[0]


def _memory() -> str:
    free = psutil.virtual_memory().available / GIB
    if free < 2:
        raise LabError(
            f"{free:.1f} GiB are free, a lesson with Spark takes about 2.5",
            "close other programs, or start fewer brokers: labkit.start(brokers=1)",
        )
    return f"{free:.1f} GiB free"


def _disk() -> str:
    folder = runtime.make_folder(runtime.home())
    return f"{shutil.disk_usage(folder).free / GIB:.1f} GiB free at {folder}"


def _jars() -> str:
    kafka, spark = len(runtime.jars("kafka")), len(runtime.jars("spark"))
    return f"{kafka} for Kafka, {spark} for Spark, all verified"


def _broker() -> str:
    import labkit

    with labkit.start(brokers=1, name="doctor", fresh=True) as cluster:
        cluster.wait_for("brokers")
        return "started, answered, stopped"


def _spark() -> str:
    from labkit.watch import session

    rows = session.session(session).range(3).count()
    session.release(session)
    return f"{version('pyspark')} starts and counts {rows} rows"


def _notebook() -> str:
    try:
        return f"JupyterLab {version('jupyterlab')}, ipykernel {version('ipykernel')}"
    except PackageNotFoundError as error:
        raise LabError(f"{error.name} is not installed", "run `make setup`") from None


def _widgets() -> str:
    needed = ("@jupyter-widgets/jupyterlab-manager", "anywidget")
    folder = Path(sys.prefix) / "share" / "jupyter" / "labextensions"
    missing = [name for name in needed if not (folder / name / "package.json").exists()]
    if missing:
        raise LabError(
            f"JupyterLab would not show widgets: {', '.join(missing)} missing", "run `make setup`"
        )
    return "ipywidgets and anywidget are known to JupyterLab"
