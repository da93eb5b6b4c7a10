"""Every notebook runs to its end, with its solutions and untouched, and reads as lessons do."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import nbformat
import psutil
import pytest
from nbformat import NotebookNode

from labkit import course
from labkit.cluster import lease
from labkit.course import Lesson
from tests.conftest import processes_of
from tests.notebooks.execute import execute

LESSONS = course.lessons()
MOST_LINES, MOST_BYTES = 15, 1_000_000
LIVE = "nbval-ignore-output"

every_lesson = pytest.mark.parametrize("lesson", LESSONS, ids=lambda lesson: lesson.path.stem)


@pytest.fixture
def enter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Make a workspace the one that counts, and let kernels be recognised by their folder."""
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path / "runtime"))

    def enter(name: str) -> Path:
        monkeypatch.setenv("LABKIT_WORKSPACE", str(tmp_path / name))
        return tmp_path / name

    return enter


def left_behind(folder: Path) -> list[psutil.Process]:
    """List what still runs of a test's kernels and of its workspace's cluster."""
    return processes_of(folder) + processes_of(lease.lab_folder("lab"))


def states(lesson: Lesson) -> set[str]:
    return {each.state for each in course.exercises(lesson.number)}


def read(lesson: Lesson) -> NotebookNode:
    return nbformat.read(lesson.path, as_version=4)


def code_cells(lesson: Lesson) -> list[NotebookNode]:
    return [cell for cell in read(lesson).cells if cell.cell_type == "code"]


def markdown(lesson: Lesson) -> str:
    return "\n\n".join(cell.source for cell in read(lesson).cells if cell.cell_type == "markdown")


@every_lesson
def test_with_its_solutions_a_notebook_gives_the_outputs_it_stores(
    lesson: Lesson, tmp_path: Path, enter: Callable[[str], Path]
) -> None:
    enter("workspace")
    copy = shutil.copy(lesson.path, tmp_path)
    shutil.copytree(lesson.path.parent / "images", tmp_path / "images")
    options = ["-p", "no:cacheprovider", "--nbval-cell-timeout=120", "--nbval-current-env"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "--nbval", copy, *options],
        cwd=tmp_path,
        env=os.environ | {"PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout
    assert f"{len(code_cells(lesson))} passed" in result.stdout
    assert states(lesson) <= {course.RIGHT}
    assert left_behind(tmp_path) == []


@every_lesson
def test_an_untouched_copy_runs_to_its_end_twice_in_a_row(
    lesson: Lesson, tmp_path: Path, enter: Callable[[str], Path]
) -> None:
    copy = enter("workspace") / lesson.path.name
    course.prepare_workspace()
    for _ in range(2):
        done = execute(copy, copy.parent)
        assert all(cell.execution_count for cell in done.cells if cell.cell_type == "code")
        assert states(lesson) <= {course.NOT_YET}
        assert left_behind(tmp_path) == []


@every_lesson
def test_a_lesson_has_one_title_goals_time_needs_and_key_points(lesson: Lesson) -> None:
    text = markdown(lesson)
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1
    first = read(lesson).cells[0].source
    assert first.startswith("# ")
    for word in ("**Afterwards you can**", "**Time:**", "**You need:**"):
        assert word in first
    after = [c.source for c in read(lesson).cells]
    points = next(n for n, source in enumerate(after) if source.startswith("## Key points"))
    assert points > max(n for n, source in enumerate(after) if ".check(" in source)


@every_lesson
def test_something_is_seen_within_three_cells(lesson: Lesson) -> None:
    assert any(cell.get("outputs") for cell in read(lesson).cells[:3])


@every_lesson
def test_cells_are_short_and_end_in_something_to_see(lesson: Lesson) -> None:
    for cell in code_cells(lesson):
        assert len(cell.source.splitlines()) <= MOST_LINES, cell.id
        assert cell.outputs and cell.execution_count, f"{cell.id}: run `make notebooks`"
        assert all(output.output_type != "error" for output in cell.outputs), cell.id


@every_lesson
def test_a_surprise_is_predicted_before_and_explained_after(lesson: Lesson) -> None:
    words = re.findall(r"\*\*(Predict|Explain)\.\*\*", markdown(lesson))
    assert words and words == ["Predict", "Explain"] * (len(words) // 2)


@every_lesson
def test_a_lesson_begins_with_an_empty_cluster_and_closes_it(lesson: Lesson) -> None:
    first, *_, last = code_cells(lesson)
    assert re.search(r"^cluster = labkit\.start\(.*fresh=True", first.source, re.MULTILINE)
    assert "cluster.close()" in last.source and read(lesson).cells[-1].id == last.id


@every_lesson
def test_outputs_that_never_change_are_compared(lesson: Lesson) -> None:
    compared = [c for c in code_cells(lesson) if LIVE not in c.metadata.get("tags", [])]
    assert len(compared) >= 3


@every_lesson
def test_nothing_stored_belongs_to_one_machine_or_one_minute(lesson: Lesson) -> None:
    notebook, text = read(lesson), lesson.path.read_text()
    assert len(text) < MOST_BYTES
    assert str(Path.home()) + "/" not in text and str(lesson.path.parent) not in text
    assert not re.search(r"127\.0\.0\.1|localhost:\d", markdown(lesson))
    assert all("execution" not in cell.metadata for cell in notebook.cells)
    assert notebook.metadata.kernelspec.name == "python3"
    assert notebook.metadata.language_info == {"name": "python"}


@every_lesson
def test_every_picture_is_there_and_is_told_in_words(lesson: Lesson) -> None:
    for words, path in re.findall(r"!\[(.*?)\]\((.*?)\)", markdown(lesson), re.DOTALL):
        assert words and (lesson.path.parent / path).is_file(), path


def test_the_map_of_the_course_marks_the_lessons_that_are_there() -> None:
    rows = re.findall(r"^\| (\d\d) \|.*\| (●|○) \w+ \|$", markdown(LESSONS[0]), re.MULTILINE)
    assert [number for number, _ in rows] == [f"{n:02}" for n in range(17)]
    assert [n for n, mark in rows if mark == "●"] == [lesson.number for lesson in LESSONS]
