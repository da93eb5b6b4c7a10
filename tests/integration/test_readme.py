"""What README and CONTRIBUTING say is so: commands and snippets run, names and files exist."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from labkit import cli
from labkit.cluster.plan import free_ports
from tests.conftest import processes_of

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")}
WITHIN = 240  # seconds for all of a page's commands; they take a quarter of that
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NOT_RUN = {"mermaid": "it is a drawing"}
# A line that begins like this is run in another way, because …
INSTEAD = {
    r"git clone\b.*": ":",  # … there is no address to clone from; the commands run in a stand-in
    r"\.ci/run\b": "test -x .ci/run",  # … it installs a system package, and runs this test
    # … they take very long, change this clone, or run this test
    r"make (test|check|soak|bench|notebooks|screenshots|lock|clean)\b": r"make -n \1 >/dev/null",
    r"make setup\b": "make -o .venv/lab setup",  # … nothing is installed while tests run
    r"make lab\b.*": "serves make -o .venv/lab lab BROWSER=no PORT=$PORT",  # … it would go on
    r"labkit lab\b": "serves labkit lab --no-browser --port $PORT",
    r"labkit start\b": "begins labkit start",
}
BASH = r"""set -euo pipefail
answers() { python -c "from urllib.request import urlopen; urlopen('http://127.0.0.1:$PORT/api')"; }
serves() {
  "$@" >lab.log 2>&1 & lab=$!
  until answers 2>/dev/null; do kill -0 $lab || { cat lab.log; return 1; }; sleep 0.2; done
  kill $lab; wait $lab || true
}
begins() {
  "$@" >start.log & cluster=$!
  until grep -q bootstrap start.log; do kill -0 $cluster; sleep 0.1; done
}
"""
# What the reader makes, and is not in the clone.
MADE = {"workspace/", "submitted/<student>/00/", "exercises_NN.py", "02-some-words.ipynb"}


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the fenced blocks of a page as (language, text)."""
    text = PAGES.get(page, page)
    found = FENCE.findall(text)
    assert len(found) * 2 == len(re.findall("^ *```", text, re.MULTILINE)), "an unpaired fence"
    unknown = {language for language, _ in found} - {"python", "sh"} - set(NOT_RUN)
    assert not unknown, f"say how to run {unknown}, or why not"
    return found


def in_other_words(script: str) -> str:
    for said, done in INSTEAD.items():
        script = re.sub(rf"^{said}", done, script, flags=re.MULTILINE)
    return script


def run(argv: list[str], folder: Path) -> str:
    """Run a program in a stand-in for a fresh clone, and leave nothing of it behind."""
    clone = folder / "clone"
    clone.mkdir(exist_ok=True)
    for entry in ROOT.iterdir():
        if not (clone / entry.name).exists():
            (clone / entry.name).symlink_to(entry)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
    environment |= {
        "PATH": f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PORT": str(free_ports(1)[0]),
        "LABKIT_WORKSPACE": str(folder / "workspace"),
        "LABKIT_GRACE": "1",
    }
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    process = subprocess.Popen(
        argv, cwd=clone, env=environment, text=True, start_new_session=True, **pipes
    )
    try:
        said = process.communicate(timeout=WITHIN)[0]
    finally:
        with suppress(ProcessLookupError):  # as it should be
            os.killpg(process.pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while left := [*processes_of(folder), *(x for x in cli._labs() if str(folder) in str(x))]:
            assert time.monotonic() < deadline, f"still there: {left}"
            time.sleep(0.1)
    assert process.returncode == 0, said
    return said


@pytest.mark.parametrize("page", PAGES)
def test_python_snippets_run_one_after_the_other(page, tmp_path):
    snippets = [text for language, text in blocks(page) if language == "python"]
    program = "\n".join(snippets).replace('"localhost:9092"', "cluster.bootstrap")
    said = run([sys.executable, "-c", program], tmp_path)
    if page == "README.md":
        assert said.count("Hello!") == 1 and "wrong · your_own_record" in said


@pytest.mark.parametrize("page", PAGES)
def test_commands_run_block_after_block(page, tmp_path):
    scripts = [in_other_words(text) for language, text in blocks(page) if language == "sh"]
    # Each block in a shell of its own that begins in the clone, as the reader's does.
    said = run(["bash", "-c", BASH + "\n".join(f"(\n{script})" for script in scripts)], tmp_path)
    if page == "README.md":
        assert "all is well" in said and "stopped lab, which was held by" in said
        grades = (tmp_path / "clone" / "marking" / "grades.csv").read_text().splitlines()
        assert grades[1].startswith("00,,,ada,") and grades[1].endswith(",0.0,0.0,0.0,1.0")


@pytest.mark.parametrize(
    "wrong", ["labkit stopp", "make labs", "labkit restore 77", "make -n nothing", "cd nowhere"]
)
def test_a_command_that_does_not_work_is_noticed(wrong, tmp_path):
    with pytest.raises(AssertionError):
        run(["bash", "-c", BASH + f"(\n{in_other_words(wrong)}\n)\necho on"], tmp_path)


def test_a_block_of_an_unknown_kind_is_noticed():
    for text in ("```yaml\na: 1\n```\n", "```\nmake\n```\n", "```sh\nmake\n"):
        with pytest.raises(AssertionError):
            blocks(text)


@pytest.mark.parametrize("page", PAGES)
def test_every_file_link_and_target_named_is_there(page):
    prose = FENCE.sub("", PAGES[page])
    links = set(re.findall(r"\]\(([^)#]+)\)", prose))
    spans = set(re.findall(r"`([^`\n]+)`", prose))
    endings = r"\S+(/|\.(py|md|toml|lock|yml|ipynb|png|svg))|\.?\w+/\S+"
    paths = {span for span in spans if re.fullmatch(endings, span) and "://" not in span} - MADE
    assert len(links) > 0 and len(paths) > 3
    rooms = ("labkit", "labkit/cluster", "labkit/groups", "labkit/watch", "labkit/views")
    folders = [ROOT, *(ROOT / name for name in (*rooms, "notebooks", "tests"))]
    missing = [path for path in links if not (ROOT / path).exists()]
    missing += [path for path in paths if not any((f / path).exists() for f in folders)]
    assert missing == []
    for span in spans:
        if re.match(r"make \S", span):
            subprocess.run([*span.split(), "-n"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_variables_commands_and_messages_are_those_of_the_code():
    readme = PAGES["README.md"]
    code = "".join(path.read_text() for path in sorted((ROOT / "labkit").rglob("*.py")))
    others = "".join((ROOT / name).read_text() for name in (".ci/run", "Makefile"))
    named = set(re.findall(r"LABKIT_[A-Z_]+", readme))
    assert set(re.findall(r"LABKIT_[A-Z_]+", code)) <= named
    assert named <= set(re.findall(r"LABKIT_[A-Z_]+", code + others))
    commands = set(re.findall(r"^    (\w+)  ", cli._parser().format_help(), re.MULTILINE))
    listed = set(re.findall(r"^labkit (\w+)", readme, re.MULTILINE))
    assert commands == listed and len(commands) == 8
    symptoms = re.findall(r"^\| (`.+?) \|", readme.split("## Troubleshooting")[1], re.MULTILINE)
    messages = [message for symptom in symptoms for message in re.findall("`([^`]+)`", symptom)]
    parts = [part.strip() for message in messages for part in message.split("…")]
    assert len(messages) > 10 and [part for part in parts if part not in code + others] == []
