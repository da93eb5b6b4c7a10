"""Versions are pinned once; `python -m tests.unit.test_lock` writes what conda gets of them."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOCKS = ["requirements.lock", "requirements-test.lock"]


def pins(lock: str) -> list[tuple[str, str]]:
    """Return the lines of a lock as (requirement, marker)."""
    text = (ROOT / lock).read_text()
    found = re.findall(r"^([a-z0-9._-]+==\S+)(?: ; ([^\\\n]+?))?(?: \\)?$", text, re.MULTILINE)
    return [(requirement, marker.strip()) for requirement, marker in found]


def environment() -> str:
    """Return environment.yml: Python from conda, everything else as pinned in the lock."""
    lines = [f"      - {r}{f' ; {m}' if m else ''}" for r, m in pins("requirements.lock")]
    return "\n".join(
        [
            "# The same versions as requirements.lock, through conda:",
            "#   conda env create -f environment.yml && conda activate labkit && labkit lab",
            "# Made by `make lock`.",
            "name: labkit",
            "channels: [conda-forge]",
            "dependencies:",
            "  - python>=3.11,<3.14",
            "  - pip",
            "  - pip:",
            "      - -e .",
            *lines,
            "",
        ]
    )


def test_conda_gets_the_versions_of_the_lock():
    assert (ROOT / "environment.yml").read_text() == environment()
    assert len(pins("requirements.lock")) > 50


def test_every_version_is_pinned_in_one_place_only():
    lab, test = ({r.split("==")[0] for r, _ in pins(lock)} for lock in LOCKS)
    assert not lab & test


def test_every_pin_has_a_hash_and_no_lock_names_an_index():
    for lock in LOCKS:
        text = (ROOT / lock).read_text()
        assert "://" not in text and "index-url" not in text
        for block in re.split(r"\n(?=[a-z])", text):
            assert "--hash=sha256:" in block, block.splitlines()[0]


def test_the_lock_satisfies_pyproject():
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ranges = project["dependencies"] + project["optional-dependencies"]["test"]
    pinned: dict[str, set[str]] = {}
    for requirement, _ in pins(LOCKS[0]) + pins(LOCKS[1]):
        name, version = requirement.split("==")
        pinned.setdefault(name, set()).add(version)
    for line in ranges:
        wanted = Requirement(line)
        assert any(wanted.specifier.contains(v) for v in pinned[wanted.name]), line


def test_every_jar_is_pinned_with_a_checksum():
    from labkit import runtime

    for part, least in (("kafka", 40), ("spark", 4)):
        jars = runtime.locked_jars(part)
        assert len(jars) >= least
        assert all(re.fullmatch("[0-9a-f]{64}", jar.sha256) for jar in jars)
        assert len({jar.file for jar in jars}) == len(jars)


if __name__ == "__main__":
    print(environment(), end="")
