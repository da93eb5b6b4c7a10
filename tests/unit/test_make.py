"""make finds a Python that really runs, whatever else carries the name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def make(folder: Path, *arguments: str, **pythons: str) -> subprocess.CompletedProcess[str]:
    """Run make with these programs as the only Pythons in PATH."""
    for name, script in pythons.items():
        program = folder / name.replace("_", ".")
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
    for tool in ("bash", "make", "sed", "echo"):
        (folder / tool).symlink_to(subprocess.check_output(["which", tool], text=True).strip())
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(
        ["make", "-f", str(ROOT / "Makefile"), *arguments],
        cwd=folder,
        env={**environment, "PATH": str(folder)},
        capture_output=True,
        text=True,
    )


SHOW = "--eval=show: ; @echo $(PYTHON)"
BROKEN = 'echo "shim: command not found" >&2; exit 127'
WORKS = f'exec {sys.executable} "$@"'


def test_a_shim_with_no_python_behind_it_is_passed_over(tmp_path: Path) -> None:
    done = make(tmp_path, SHOW, "show", python3_13=BROKEN, python3_11=WORKS)
    assert done.stdout.strip() == str(tmp_path / "python3.11"), done.stderr


@pytest.mark.parametrize("pythons", [{}, {"python3": BROKEN}])
def test_without_any_python_make_says_what_to_do(tmp_path: Path, pythons: dict[str, str]) -> None:
    done = make(tmp_path, ".venv/bin/python", **pythons)
    assert done.returncode != 0
    assert "labkit needs Python 3.11, 3.12 or 3.13 with venv, and found: none" in done.stdout
    assert "make lab PYTHON=" in done.stdout
    assert not (tmp_path / ".venv").exists()
