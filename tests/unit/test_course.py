"""Exercises say what is right, wrong or missing, and the learner's work is never lost."""

from __future__ import annotations

import copy
import errno
import inspect
import json
import math
import multiprocessing
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pandas as pd
import pytest
from IPython.core.formatters import DisplayFormatter
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from nbgrader.preprocessors import ClearSolutions
from nbgrader.utils import determine_grade

import labkit
from labkit import course
from labkit.course import CODE_STUB, TEXT_STUB, Exercises, LabError, Lesson

pytestmark = pytest.mark.filterwarnings("ignore:the ground shakes")
REAL = [
    Lesson(path.name[:2], path)
    for path in sorted((Path(labkit.__file__).parents[1] / "notebooks").glob("[0-9]*.ipynb"))
]
CHECKS = '''
import sys
import warnings

from labkit.course import LabError, exercise, not_yet, wrong


@exercise(points=2, hints=["Count the leader too.", "Is `3` not the brokers?"], why="One leads.")
def how_many_copies(answer):
    """How many copies of each record are there?"""
    if answer > 2:
        return wrong(f"{answer} is the number of brokers: each may hold a copy, not all do")
    return answer == 2


@exercise(points=0.5, hints=["Look at `cluster.topics()`."], why="A topic is made by its name.")
def make_a_topic(cluster):
    """Make the topic orders."""
    if not cluster:
        return not_yet("Make the topic first.")
    return "orders" in cluster or wrong("there are topics, but orders is not among them")


@exercise(hints=["None."], why="It is noisy.")
def noisy(answer, cluster):
    """Give 1, whatever is said."""
    warnings.warn("the ground shakes")
    print("a remark", file=sys.stderr)
    if cluster == "gone":
        raise LabError("broker 7 is gone", "restart it")
    return answer == 1 or "only 1 will do"
'''


def solution(source: str, **more: Any) -> Any:
    metadata = {"solution": True, "grade": False, "locked": False, "schema_version": 3}
    cell = new_code_cell(source, metadata={"nbgrader": metadata | {"grade_id": "x", **more}})
    cell["metadata"]["nbgrader"]["grade_id"] = cell["id"]
    return cell


def check(source: str, points: float) -> Any:
    metadata = {"solution": False, "grade": True, "locked": True, "schema_version": 3}
    cell = new_code_cell(source, metadata={"nbgrader": metadata | {"points": points}})
    cell["metadata"]["nbgrader"]["grade_id"] = cell["id"]
    return cell


def answered(name: str, code: str) -> str:
    return f"{name} = ...\n### BEGIN SOLUTION\n{name} = {code}\n### END SOLUTION"


def topics_lesson() -> Any:
    begin = "from labkit.course import exercises\nexercises = exercises('02')"
    cells = [
        new_markdown_cell("Read me first.\n\n# Topics and logs\n\n# not this one"),
        new_code_cell(begin, execution_count=1, outputs=[]),
        new_markdown_cell("Then `exercises.make_a_topic.check(cluster)` looks at what you did."),
        solution(answered("copies", "1 + 1")),
        check("exercises.how_many_copies.check(copies)", 2),
        solution("cluster = []\nif True:\n    ### BEGIN SOLUTION\n    cluster.append('orders')\n"
                 "    ### END SOLUTION"),
        check("exercises.make_a_topic.check(cluster)", 0.5),
        solution(answered("one", "1")),
        check("exercises.noisy.check(one, cluster)", 1),
    ]  # fmt: skip
    cells[1]["outputs"] = [nbformat.v4.new_output("stream", name="stdout", text="ready")]
    return new_notebook(cells=cells, metadata={"widgets": {"state": {}}})


def write(folder: Path, name: str, notebook: Any, checks: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    nbformat.write(notebook, path)
    if checks:
        (folder / f"exercises_{name[:2]}.py").write_text(checks)
    return path


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A course of two lessons, and a workspace that does not exist yet."""
    folder = tmp_path / "course"
    write(folder, "00-start-here.ipynb", new_notebook(cells=[new_markdown_cell("# Start here")]))
    path = write(folder, "02-topics-and-logs.ipynb", topics_lesson(), CHECKS)
    monkeypatch.setenv("LABKIT_COURSE", str(folder))
    monkeypatch.setenv("LABKIT_WORKSPACE", str(tmp_path / "work"))
    return path


@pytest.fixture
def ex(source: Path) -> Exercises:
    return course.exercises("02")


@pytest.fixture
def work(source: Path, tmp_path: Path) -> Path:
    return tmp_path / "work"


def blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "file").write_text("a regular file")
    monkeypatch.setenv("LABKIT_WORKSPACE", str(tmp_path / "file" / "work"))
    return tmp_path / "file" / "work"


# What a check says


def test_a_right_answer_earns_its_points_and_the_reason(ex: Exercises, capsys: Any) -> None:
    assert ex.how_many_copies.check(2) == 2
    assert capsys.readouterr().out == "✓ right · how_many_copies\n  One leads.\n"


def test_a_wrong_answer_meets_its_misconception_and_is_shown(ex: Exercises, capsys: Any) -> None:
    assert ex.how_many_copies.check(3) == 0
    said = capsys.readouterr().out
    assert said.startswith("✗ wrong · how_many_copies\n  3 is the number of brokers")
    assert said.endswith("Your answer: 3\n")


def test_a_wrong_answer_without_a_message_is_shown_too(ex: Exercises, capsys: Any) -> None:
    assert ex.how_many_copies.check(np.int64(-17)) == 0
    assert "wrong" in (said := capsys.readouterr().out) and "-17" in said


def test_a_sentence_alone_means_wrong(ex: Exercises) -> None:
    assert ex.noisy.judge(2, "here") == course.wrong("only 1 will do")


@pytest.mark.parametrize("stub", [..., None, [..., 2], (1, ...), {"acks": ...}])
def test_an_untouched_stub_is_not_an_attempt(ex: Exercises, stub: Any, capsys: Any) -> None:
    assert ex.how_many_copies.check(stub) == 0
    assert capsys.readouterr().out.startswith("○ not attempted yet · how_many_copies")
    assert ex.noisy.check(1, stub) == 0
    assert ex.noisy.check(stub, "here") == 0
    assert ex.how_many_copies.state == ex.noisy.state == course.NOT_YET


def test_a_check_may_see_that_nothing_was_done_yet(ex: Exercises, capsys: Any) -> None:
    assert ex.make_a_topic.check([]) == 0
    assert "not attempted yet" in (said := capsys.readouterr().out) and "Make the topic" in said
    assert ex.make_a_topic.check(["payments"]) == 0
    assert "orders is not among them" in capsys.readouterr().out
    assert ex.make_a_topic.check(["orders"]) == 0.5


class Thorny:
    """Refuse to be compared, and to be printed."""

    def __gt__(self, other: object) -> bool:
        raise RuntimeError("compare me not")

    __eq__ = __gt__  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise RuntimeError("print me not")


class Speechless(Exception):
    """Fail even at saying why."""

    def __str__(self) -> str:
        raise RuntimeError("no words")


class Mute:
    """Raise what cannot be printed."""

    def __gt__(self, other: object) -> bool:
        raise Speechless


ODD = ["two", b"2", [2], (1, 2), {2}, {"a": 2}, [Thorny()], math.nan, 2j, 10**400, print, Thorny(),
       Mute(), pd.Series([2, 2]), pd.DataFrame({"a": [2]}), pd.NA, np.array([1, 2])]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=lambda value: type(value).__name__)
def test_an_odd_answer_is_wrong_and_never_a_stack_trace(
    ex: Exercises, odd: Any, capsys: Any
) -> None:
    assert ex.how_many_copies.check(odd) == 0
    said = capsys.readouterr()
    assert said.out.startswith("✗ wrong · how_many_copies\n  ")
    assert "Traceback" not in said.out and said.err == ""
    assert len(said.out) < 700


def test_the_sentence_about_an_odd_answer_names_its_type(ex: Exercises) -> None:
    text = ex.how_many_copies.judge("two").text
    assert "(str)" in text and "TypeError: '>' not supported" in text


def test_a_call_with_too_few_arguments_says_which_is_missing(ex: Exercises, capsys: Any) -> None:
    assert ex.noisy.check(1) == 0
    assert "missing 1 required positional argument: 'cluster'" in capsys.readouterr().out


def test_an_error_of_the_cluster_is_shown_as_it_is(ex: Exercises, capsys: Any) -> None:
    assert ex.noisy.check(1, "gone") == 0
    assert capsys.readouterr().out.startswith("✗ wrong · noisy\n  broker 7 is gone\n  restart it\n")


def test_a_check_writes_nothing_to_stderr(ex: Exercises, capsys: Any) -> None:
    assert ex.noisy.check(1, "here") == 1
    assert capsys.readouterr().err == ""


def test_an_interrupt_is_the_learners_own(ex: Exercises, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(answer: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ex.noisy, "function", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ex.noisy.check(1)


def test_a_card_is_safe_and_readable_as_html() -> None:
    card = course.Card("wrong", "`acks` <b>\nnext", "a&b", code="x < 1")
    shown = card._repr_html_()
    assert "✗ wrong" in shown and "a&amp;b" in shown and "x &lt; 1" in shown
    assert "<code>acks</code> &lt;b&gt;\nnext" in shown and "pre-wrap" in shown
    assert re.findall(r"var\(--jp-[\w-]+, #\w+\)", shown), "every colour has a fallback"


# Hints and solutions


def test_each_hint_gives_one_more_then_says_that_there_are_none(ex: Exercises, capsys: Any) -> None:
    ex.how_many_copies.hint()
    assert capsys.readouterr().out == (
        "→ hint · how_many_copies (1 of 2)\n  1. Count the leader too.\n"
    )
    course.exercises("02").how_many_copies.hint()
    assert "2. Is `3` not the brokers?" in (said := capsys.readouterr().out) and "1. " in said
    assert "no more" not in said
    ex.how_many_copies.hint()
    assert "no more hints" in (said := capsys.readouterr().out) and "1. " in said and "2. " in said


def test_a_hint_is_no_attempt(ex: Exercises) -> None:
    ex.how_many_copies.hint()
    assert ex.how_many_copies.state == course.NOT_YET


def test_the_solution_opens_after_an_attempt(ex: Exercises, capsys: Any) -> None:
    ex.how_many_copies.check(...)
    capsys.readouterr()
    ex.how_many_copies.solution()
    assert "Try it first" in (said := capsys.readouterr().out) and "1 + 1" not in said
    ex.how_many_copies.check(7)
    capsys.readouterr()
    ex.how_many_copies.solution()
    assert capsys.readouterr().out == (
        "★ solution · how_many_copies\n  copies = 1 + 1\n\n  One leads.\n"
    )


def test_a_solution_is_that_of_its_own_exercise(source: Path) -> None:
    assert course.find_lesson("02").solutions() == {
        "how_many_copies": "copies = 1 + 1",
        "make_a_topic": "cluster.append('orders')",
        "noisy": "one = 1",
    }


def test_a_solution_may_share_the_cell_of_its_check(source: Path) -> None:
    cell = solution(answered("copies", "2") + "\nexercises.how_many_copies.check(copies)")
    write(source.parent, source.name, new_notebook(cells=[cell]))
    assert course.find_lesson("02").solutions() == {"how_many_copies": "copies = 2"}


# Finding a lesson and an exercise


@pytest.mark.parametrize("which", ["02", "2", 2, " 02 ", "02-topics", "02-topics-and-logs.ipynb"])
def test_a_lesson_is_found_by_number_or_name(source: Path, which: str | int) -> None:
    assert course.find_lesson(which) == Lesson("02", source)


@pytest.mark.parametrize("which", ["20", 20, "", "-2", "2.0", None, True, "02-topisc", "..", "²"])
def test_an_unknown_lesson_is_named_beside_the_known_ones(source: Path, which: Any) -> None:
    with pytest.raises(LabError) as raised:
        course.exercises(which)
    assert f"there is no lesson {which!r}" in raised.value.what
    assert raised.value.to_do == "use one of: 00 (Start here), 02 (Topics and logs)"


def test_a_misspelt_lesson_is_suggested(source: Path) -> None:
    with pytest.raises(LabError, match="did you mean '02-topics-and-logs'"):
        course.restore("02-topic-and-log")


def test_a_course_without_lessons_says_where_it_looked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LABKIT_COURSE", str(tmp_path / "nowhere"))
    with pytest.raises(LabError, match=r"nowhere\n.*LABKIT_COURSE"):
        course.lessons()


def test_an_unknown_exercise_suggests_the_nearest(ex: Exercises) -> None:
    with pytest.raises(LabError) as raised:
        _ = ex.how_many_copy
    assert "'how_many_copy'; did you mean 'how_many_copies'?" in raised.value.what
    assert raised.value.to_do == "use one of: how_many_copies, make_a_topic, noisy"


def test_python_can_ask_for_any_attribute(ex: Exercises) -> None:
    assert not hasattr(ex, "nothing_like_it") and not hasattr(ex, "_repr_png_")
    assert getattr(ex, "nothing_like_it", 5) == 5
    bundle, _ = DisplayFormatter().format(ex)
    assert {"text/plain"} <= set(bundle)
    assert inspect.unwrap(ex) is ex and dir(copy.copy(ex)) == dir(ex)


def test_tab_completes_the_exercises_and_hides_the_answers(ex: Exercises) -> None:
    assert dir(ex) == ["how_many_copies", "make_a_topic", "noisy"]
    assert {"check", "hint", "solution"} <= set(dir(ex.noisy))
    assert not {"why", "hints", "function"} & set(dir(ex.noisy))


def test_the_table_shows_question_points_and_state_in_words(ex: Exercises) -> None:
    ex.how_many_copies.check(2)
    ex.noisy.check(2, "here")
    lines = repr(ex).splitlines()
    assert lines[0].split() == ["exercise", "question", "points", "state"]
    assert re.fullmatch(r"how_many_copies  How many .* there\?  2 +✓ right", lines[1])
    assert re.fullmatch(
        r"make_a_topic +Make the topic orders\. +0\.5 +○ not attempted yet", lines[2]
    )
    assert lines[3].endswith("✗ wrong")
    table = pd.DataFrame(re.findall(r"<t[hd] [^>]*>([^<]*)</t[hd]>", ex._repr_html_()))
    assert table[0].tolist()[:4] == ["exercise", "question", "points", "state"]
    assert len(table) == 16 and table[0].tolist()[7] == "✓ right"
    assert ex._repr_html_().count("<th ") == ex._repr_html_().count("</th>") == 4


def test_one_exercise_shows_its_question_and_what_can_be_called(ex: Exercises) -> None:
    assert repr(ex.noisy) == (
        "○ not attempted yet · noisy\n"
        "  Give 1, whatever is said.\n"
        "  .check(answer, cluster)  .hint()  .solution()"
    )


def test_a_lesson_may_have_no_exercises(source: Path) -> None:
    assert list(course.exercises("00")) == []
    assert repr(course.exercises(0)).split() == ["exercise", "question", "points", "state"]


# Progress


def saved(work: Path) -> dict[str, Any]:
    exercises: dict[str, Any] = json.loads((work / ".progress.json").read_bytes())["exercises"]
    return exercises


def test_progress_is_the_best_that_was_reached(ex: Exercises, work: Path) -> None:
    for answer in (3, 2, 1):
        ex.how_many_copies.check(answer)
    ex.how_many_copies.hint()
    assert saved(work) == {"02.how_many_copies": {"attempts": 3, "right": 1, "hints": 1}}
    assert course.exercises("02").how_many_copies.state == "right"


def test_progress_covers_all_lessons(ex: Exercises) -> None:
    ex.how_many_copies.check(2)
    ex.make_a_topic.check(["orders"])
    ex.noisy.check(2, "here")
    assert course.progress().to_dict("records") == [
        {"lesson": "00", "title": "Start here", "right": 0, "exercises": 0, "points": 0, "of": 0},
        {"lesson": "02", "title": "Topics and logs", "right": 2, "exercises": 3, "points": 2.5,
         "of": 3.5},
    ]  # fmt: skip


def test_looking_remembers_nothing(ex: Exercises, work: Path) -> None:
    assert repr(ex) and ex._repr_html_() and repr(ex.noisy) and len(course.progress())
    ex.noisy.check(..., "here")
    ex.noisy.solution()
    assert not (work / ".progress.json").exists()


def answer_often(times: int) -> None:
    exercise = course.exercises("02").how_many_copies
    for _ in range(times):
        exercise._remember("attempts")


def test_no_attempt_is_lost_when_several_kernels_write(ex: Exercises, work: Path) -> None:
    fork = multiprocessing.get_context("fork")
    kernels = [fork.Process(target=answer_often, args=(100,)) for _ in range(4)]
    for kernel in kernels:
        kernel.start()
    for kernel in kernels:
        kernel.join(30)
    assert [kernel.exitcode for kernel in kernels] == [0] * 4
    assert saved(work)["02.how_many_copies"]["attempts"] == 400
    assert sorted(path.name for path in work.iterdir()) == [".progress.json", ".progress.lock"]


DAMAGED = ["", "{", "[]", "null", "{}", '{"exercises": {}, "copies": []}', "\x00\x01",
           '{"exercises": [], "copies": {}}', '{"exercises": {"02.noisy": 3}, "copies": {}}',
           '{"exercises": {"02.noisy": {"attempts": "many"}}, "copies": {}}']  # fmt: skip


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_progress_file_is_moved_aside_with_a_note(
    ex: Exercises, work: Path, text: str, capsys: Any
) -> None:
    work.mkdir()
    for kept in (".progress-1.damaged", ".progress-2.damaged"):
        (work / ".progress.json").write_text(text)
        assert ex.how_many_copies.check(2) == 2
        said = capsys.readouterr().out
        assert "could not be read" in said and str(work / kept) in said and "✓ right" in said
        assert (work / kept).read_text() == text
        assert saved(work)["02.how_many_copies"]["right"] >= 1
    assert len(course.progress()) == 2


def fill_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.write_bytes

    def half(path: Path, data: bytes) -> int:
        real(path, data[: len(data) // 2])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", half)


def test_a_full_disk_leaves_the_old_progress_and_shows_the_result(
    ex: Exercises, work: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    ex.how_many_copies.check(3)
    before = (work / ".progress.json").read_bytes()
    fill_the_disk(monkeypatch)
    assert ex.how_many_copies.check(2) == 2
    said = capsys.readouterr().out
    assert "✓ right" in said and "not saved" in said and "No space left" in said
    assert (work / ".progress.json").read_bytes() == before
    assert sorted(path.name for path in work.iterdir()) == [".progress.json", ".progress.lock"]


def test_without_a_workspace_all_is_shown_with_a_note(
    ex: Exercises, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path = blocked(tmp_path, monkeypatch)
    assert ex.how_many_copies.check(2) == 2
    said = capsys.readouterr().out
    assert "✓ right" in said and f"not saved: the workspace {path} cannot be written" in said
    for number in (1, 2):
        ex.how_many_copies.hint()
        assert f"({number} of 2)" in capsys.readouterr().out
    ex.how_many_copies.solution()
    assert "copies = 1 + 1" in capsys.readouterr().out
    assert "✓ right" in repr(ex)


# The workspace


def test_the_learner_gets_copies_without_solutions_and_outputs(source: Path, work: Path) -> None:
    assert course.prepare_workspace() == work
    names = {path.name for path in work.glob("*.ipynb")}
    assert names == {"00-start-here.ipynb", "02-topics-and-logs.ipynb"}
    ours, theirs = (nbformat.read(path / source.name, 4) for path in (source.parent, work))
    nbformat.validate(theirs)
    assert [(c.id, c.metadata) for c in ours.cells] == [(c.id, c.metadata) for c in theirs.cells]
    assert "1 + 1" not in str(theirs) and "SOLUTION" not in str(theirs)
    assert theirs.cells[3].source == f"copies = ...\n{CODE_STUB}"
    assert theirs.cells[5].source == f"cluster = []\nif True:\n    {CODE_STUB}"
    code = [cell for cell in theirs.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert "widgets" not in theirs.metadata


def test_pictures_come_along_and_are_kept_new(source: Path, work: Path) -> None:
    picture = source.parent / "images" / "deep" / "log.svg"
    picture.parent.mkdir(parents=True)
    for text in ("<svg/>", "<svg>new</svg>"):
        picture.write_text(text)
        course.prepare_workspace()
        assert (work / "images" / "deep" / "log.svg").read_text() == text


def test_the_learners_work_is_never_overwritten(source: Path, work: Path, capsys: Any) -> None:
    course.prepare_workspace()
    mine = work / source.name
    mine.write_text(text := mine.read_text().replace("copies = ...", "copies = 42"))
    course.prepare_workspace()
    assert mine.read_text() == text and capsys.readouterr().out == ""
    source.write_text(source.read_text().replace("Topics and logs", "Topics and their logs"))
    course.prepare_workspace()
    assert mine.read_text() == text
    assert "labkit restore 02" in capsys.readouterr().out


def test_a_file_that_was_there_before_is_left_alone(source: Path, work: Path) -> None:
    work.mkdir()
    (work / source.name).write_text("my own")
    course.prepare_workspace()
    course.prepare_workspace()
    assert (work / source.name).read_text() == "my own"


def test_work_is_safe_when_the_saved_state_is_lost(source: Path, work: Path) -> None:
    course.prepare_workspace()
    (work / source.name).write_text("my own")
    (work / ".progress.json").unlink()
    course.prepare_workspace()
    assert (work / source.name).read_text() == "my own"


def test_an_untouched_copy_follows_the_course(source: Path, work: Path, capsys: Any) -> None:
    course.prepare_workspace()
    for title in ("A second title", "A third title"):
        source.write_text(re.sub("# [^n][^\\\\]*", f"# {title}", source.read_text(), count=1))
        course.prepare_workspace()
        assert title in (work / source.name).read_text()
    assert capsys.readouterr().out == ""


def test_an_unchanged_copy_is_not_written_again(source: Path, work: Path) -> None:
    course.prepare_workspace()
    os.utime(work / source.name, (1, 1))
    course.prepare_workspace()
    assert (work / source.name).stat().st_mtime == 1


def test_restore_gives_a_fresh_copy_and_keeps_every_old_one(
    source: Path, work: Path, capsys: Any
) -> None:
    course.prepare_workspace()
    fresh = (work / source.name).read_bytes()
    for number in (1, 2):
        (work / source.name).write_text(f"my work {number}")
        assert course.restore("2") == work / source.name
        assert (work / source.name).read_bytes() == fresh
        kept = work / f"02-topics-and-logs-{number}.kept.ipynb"
        assert kept.read_text() == f"my work {number}" and str(kept) in capsys.readouterr().out
    course.restore("2")
    assert len(list(work.glob("*.kept.ipynb"))) == 2, "an untouched copy needs no keeping"


def test_a_restored_copy_follows_the_course_again(source: Path, work: Path) -> None:
    course.prepare_workspace()
    (work / source.name).write_text("my work")
    source.write_text(source.read_text().replace("Topics and logs", "Second edition"))
    course.restore("02")
    source.write_text(source.read_text().replace("Second edition", "Third edition"))
    course.prepare_workspace()
    assert "Third edition" in (work / source.name).read_text()


def test_restore_on_a_full_disk_loses_nothing(
    source: Path, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    course.prepare_workspace()
    (work / source.name).write_text("my work")
    before = sorted(path.name for path in work.iterdir())
    fill_the_disk(monkeypatch)
    with pytest.raises(LabError, match="No space left"):
        course.restore("02")
    assert (work / source.name).read_text() == "my work"
    assert sorted(path.name for path in work.iterdir()) == before


def test_restore_of_an_unknown_lesson_touches_nothing(source: Path, work: Path) -> None:
    with pytest.raises(LabError, match="there is no lesson '77'\nuse one of: 00"):
        course.restore("77")
    assert not work.exists()


@pytest.mark.parametrize("act", [course.prepare_workspace, course.progress,
                                 lambda: course.restore("02")])  # fmt: skip
def test_a_workspace_that_cannot_be_written_is_named(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[], Any]
) -> None:
    path = blocked(tmp_path, monkeypatch)
    with pytest.raises(LabError) as raised:
        act()
    assert raised.value.what == f"the workspace {path} cannot be written: Not a directory"
    assert "LABKIT_WORKSPACE" in raised.value.to_do
    assert (tmp_path / "file").read_text() == "a regular file"


# nbgrader agrees


def by_nbgrader(path: Path) -> Any:
    clear = ClearSolutions(code_stub={"python": CODE_STUB}, text_stub=TEXT_STUB)
    return clear.preprocess(nbformat.read(path, 4), {})[0]


def strange_lesson() -> Any:
    text = new_markdown_cell("### BEGIN SOLUTION\nBecause.\n### END SOLUTION")
    prose = new_markdown_cell("Any thoughts?\n")
    text["metadata"] = prose["metadata"] = solution("")["metadata"]
    return new_notebook(cells=[
        solution("def f(x):\n    if x:\n\t## BEGIN SOLUTION here\n\treturn 1\n\n    #END SOLUTION\n"
                 "    ### BEGIN SOLUTION\n    return 2\n    ### END SOLUTION\n\nf(1)\n"),
        solution("### BEGIN SOLUTION\n### END SOLUTION"), solution("whole = 'cell'"),
        text, prose, new_markdown_cell(""), new_code_cell("plain = 'é\u2028'"),
    ])  # fmt: skip


def lesson_id(lesson: Any) -> str:
    return lesson if isinstance(lesson, str) else str(lesson.path.name)


MADE_UP = {"10-usual.ipynb": topics_lesson, "11-strange.ipynb": strange_lesson}


@pytest.mark.parametrize("lesson", [*MADE_UP, *REAL], ids=lesson_id)
def test_clearing_equals_what_nbgrader_clears(lesson: Any, tmp_path: Path) -> None:
    if isinstance(lesson, str):
        lesson = Lesson(lesson[:2], write(tmp_path, lesson, MADE_UP[lesson]()))
    ours, theirs = nbformat.reads(lesson.cleared().decode(), 4), by_nbgrader(lesson.path)
    assert [cell.source for cell in ours.cells] == [cell.source for cell in theirs.cells]
    assert [cell.metadata for cell in ours.cells] == [cell.metadata for cell in theirs.cells]


UNPAIRED = ["### BEGIN SOLUTION\nx", "x\n### END SOLUTION",
            "### END SOLUTION\n### BEGIN SOLUTION",
            "### BEGIN SOLUTION\n### BEGIN SOLUTION\n### END SOLUTION\n### END SOLUTION",
            "### BEGIN SOLUTION\n### END SOLUTION\n### END SOLUTION"]  # fmt: skip


@pytest.mark.parametrize("text", UNPAIRED)
def test_unpaired_markers_name_the_notebook_and_the_cell(source: Path, text: str) -> None:
    write(source.parent, source.name, new_notebook(cells=[new_code_cell("1"), solution(text)]))
    with pytest.raises(LabError, match=r"cell 2 of .*02-topics-and-logs.ipynb do not pair up"):
        course.prepare_workspace()


def run_all(path: Path) -> Any:
    notebook = nbformat.read(path, 4)
    NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    return notebook


def marks(notebook: Any) -> list[float]:
    grade = [c for c in notebook.cells if c.metadata.get("nbgrader", {}).get("grade")]
    return [determine_grade(cell)[0] for cell in grade]


def test_nbgrader_gives_the_points_that_a_check_returns(source: Path, work: Path) -> None:
    course.prepare_workspace()
    assert marks(run_all(work / source.name)) == [0, 0, 0]
    assert list(course.progress()["right"]) == [0, 0]

    notebook = topics_lesson()
    notebook.cells.append(check("exercises.how_many_copies.check(3)", 2))
    solved = run_all(write(source.parent, source.name, notebook))
    assert marks(solved) == [2, 0.5, 1, 0]
    assert list(course.progress()["points"]) == [0, 3.5]
    card, points = solved.cells[4].outputs
    assert card.data["text/plain"].startswith("✓ right") and "✓ right" in card.data["text/html"]
    assert points.data["text/plain"] == "2.0" and "points: 2" in points.data["text/html"]


# What an exercise must have, in every lesson


def faults(lesson: Lesson) -> list[str]:
    """List what is missing from the texts and the notebook of a lesson's exercises."""
    found, solutions = [], lesson.solutions()
    notebook = nbformat.read(lesson.path, 4)
    for each in Exercises(lesson):
        texts = {"question": [each.question], "why": [each.why], "hint": each.hints or [""]}
        found += [f"{each.name}: empty {k}" for k, v in texts.items() if not all(map(str.strip, v))]
        if not solutions.get(each.name):
            found.append(f"{each.name}: no solution")
        for cell in notebook.cells:
            metadata = cell.metadata.get("nbgrader", {})
            points = metadata.get("points") if metadata.get("grade") else each.points
            if f".{each.name}.check(" in cell.source and points != each.points:
                found.append(f"{each.name}: nbgrader gives {points} points")
    known = {each.name for each in Exercises(lesson)}
    return found + [f"{name}: no such exercise" for name in solutions if name not in known]


def faults_in_running(
    lesson: Lesson, run: Callable[[Any], None], fresh: Callable[[str], None]
) -> list[str]:
    """List the exercises whose starter passes or whose solution fails, each run in a workspace."""
    fresh("solved")
    run(nbformat.read(lesson.path, 4))
    found = [f"{x.name}: the solution fails" for x in Exercises(lesson) if x.state != "right"]
    fresh("untouched")
    run(nbformat.reads(lesson.cleared().decode(), 4))
    return found + [f"{x.name}: the starter is {x.state}" for x in Exercises(lesson)
                    if x.state != course.NOT_YET]  # fmt: skip


def run_here(notebook: Any) -> None:
    names: dict[str, Any] = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            exec(cell.source, names)


@pytest.mark.parametrize("lesson", REAL, ids=lesson_id)
def test_every_exercise_of_the_course_is_complete(lesson: Lesson) -> None:
    assert faults(lesson) == []


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    return lambda name: monkeypatch.setenv("LABKIT_WORKSPACE", str(tmp_path / name))


def test_a_complete_lesson_has_no_faults(source: Path, fresh: Callable[[str], None]) -> None:
    lesson = course.find_lesson("02")
    assert faults(lesson) == [] == faults_in_running(lesson, run_here, fresh)


CHANGES = {
    "no solution": ("SOLUTION", "", "how_many_copies: no solution"),
    "empty hint": ("Count the leader too.", " ", "how_many_copies: empty hint"),
    "no why": ("One leads.", "", "how_many_copies: empty why"),
    "other points": ("points=2", "points=3", "how_many_copies: nbgrader gives 2 points"),
    "misspelt": ("def noisy", "def noisier", "noisy: no such exercise"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_an_incomplete_exercise_is_refused(source: Path, change: str) -> None:
    old, new, fault = CHANGES[change]
    notebook = topics_lesson()
    notebook.cells[3].source = notebook.cells[3].source.replace(old, new)
    write(source.parent, source.name, notebook, CHECKS.replace(old, new))
    assert fault in faults(course.find_lesson("02"))


def test_a_starter_that_passes_and_a_solution_that_fails_are_refused(
    source: Path, fresh: Callable[[str], None]
) -> None:
    notebook = topics_lesson()
    notebook.cells[3].source = answered("copies", "2").replace("...", "2", 1)
    notebook.cells[7].source = answered("one", "7")
    write(source.parent, source.name, notebook)
    assert faults_in_running(course.find_lesson("02"), run_here, fresh) == [
        "noisy: the solution fails",
        "how_many_copies: the starter is right",
    ]


def test_an_untouched_function_body_still_runs(source: Path) -> None:
    body = (
        "def f():\n    ### BEGIN SOLUTION\n    return 1\n    ### END SOLUTION\nassert f() is None"
    )
    write(source.parent, source.name, new_notebook(cells=[solution(body)]))
    run_here(nbformat.reads(course.find_lesson("02").cleared().decode(), 4))
