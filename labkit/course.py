"""Exercises with their hints and solutions, the learner's progress, and the learner's workspace."""

from __future__ import annotations

import contextlib
import fcntl
import html
import inspect
import io
import itertools
import json
import numbers
import os
import re
import reprlib
import runpy
import textwrap
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
from IPython.display import display

from labkit.errors import LabError, nearest
from labkit.progress import Progress
from labkit.runtime import workspace

Check = Callable[..., Any]
# pass, because a stub may be all that is left of a function, and shows nothing at a cell's end.
CODE_STUB = "pass  # your turn: write your answer in place of this line"
TEXT_STUB = "*Your turn: write your answer here.*"
# As in nbgrader, a line with these words is a marker, and the stub takes the first one's indent.
SOLUTION = re.compile(r"^([ \t]*).*BEGIN SOLUTION.*\n((?:.*\n)*?).*END SOLUTION.*$", re.MULTILINE)
RIGHT, WRONG, NOT_YET = "right", "wrong", "not attempted yet"
SIGNS = {RIGHT: "✓", WRONG: "✗", NOT_YET: "○", "hint": "→", "solution": "★", "note": "!"}
COLOURS = {RIGHT: "var(--jp-success-color1, #388e3c)", WRONG: "var(--jp-error-color1, #d32f2f)"}
# A cluster or a table is not what a learner wrote as the answer; one of these is.
PLAIN = (numbers.Number, str, bytes, list, tuple, set, frozenset, dict)
MUTED = "color:var(--jp-ui-font-color2, #757575)"


class Lesson(NamedTuple):
    """Read one lesson's source notebook."""

    number: str
    path: Path

    def read(self) -> dict[str, Any]:
        """Return the notebook, each cell's text in one piece."""
        notebook: dict[str, Any] = json.loads(self.path.read_bytes())
        for cell in notebook["cells"]:
            cell["source"] = "".join(cell["source"])
        return notebook

    @property
    def title(self) -> str:
        """Return the first heading."""
        text = "\n".join(c["source"] for c in self.read()["cells"] if c["cell_type"] == "markdown")
        heading = re.search(r"^# +(.+)$", text, re.MULTILINE)
        return heading[1].strip() if heading else self.path.stem[3:]

    def solutions(self) -> dict[str, str]:
        """Return for each ``.name.check(`` the solutions since the check before it."""
        found: dict[str, str] = {}
        parts: list[str] = []
        for cell in self.read()["cells"]:
            if cell["cell_type"] == "code":
                parts += [textwrap.dedent(x[1]).strip() for x in SOLUTION.findall(cell["source"])]
                if names := re.findall(r"\.(\w+)\.check\(", cell["source"]):
                    found = dict.fromkeys(names, "\n\n".join(parts)) | found
                    parts = []
        return found

    def cleared(self) -> bytes:
        """Return the notebook as a learner gets it: no solutions, no outputs."""
        notebook = self.read()
        for number, cell in enumerate(notebook["cells"], 1):
            stub = CODE_STUB if cell["cell_type"] == "code" else TEXT_STUB
            text, count = SOLUTION.subn(rf"\g<1>{stub}", cell["source"])
            if re.findall("(BEGIN|END) SOLUTION", cell["source"]) != ["BEGIN", "END"] * count:
                what = f"the solution markers in cell {number} of {self.path} do not pair up"
                raise LabError(what, "write ### BEGIN SOLUTION above it, ### END SOLUTION below")
            whole = cell["metadata"].get("nbgrader", {}).get("solution") and not count
            cell["source"] = (stub if whole else text).splitlines(keepends=True)
            if cell["cell_type"] == "code":
                cell.update(outputs=[], execution_count=None)
        notebook["metadata"].pop("widgets", None)  # the state of outputs that are gone
        return (json.dumps(notebook, indent=1, ensure_ascii=False) + "\n").encode()


def course_folder() -> Path:
    """Return the folder of the source notebooks (``LABKIT_COURSE`` overrides)."""
    chosen = os.environ.get("LABKIT_COURSE")
    return Path(chosen).absolute() if chosen else Path(__file__).parents[1] / "notebooks"


def lessons() -> list[Lesson]:
    """List the lessons of the course in order."""
    paths = sorted(course_folder().glob("[0-9][0-9]-*.ipynb"))
    if not paths:
        to_do = "install labkit from a clone of the course, or set LABKIT_COURSE"
        raise LabError(f"there are no lessons in {course_folder()}", to_do)
    return [Lesson(path.name[:2], path) for path in paths]


def find_lesson(which: str | int) -> Lesson:
    """Return the lesson meant by ``2``, ``"02"`` or the beginning of its file name."""
    known, text = lessons(), str(which).strip()
    start = f"{int(text):02}-" if text.isdecimal() else text
    for lesson in known:
        if start and lesson.path.name.startswith(start):
            return lesson
    what = f"there is no lesson {which!r}{nearest(text, [x.path.stem for x in known])}"
    raise LabError(what, "use one of: " + ", ".join(f"{x.number} ({x.title})" for x in known))


class Card(NamedTuple):
    """Show a sign, a word and a few lines, as text or in the notebook's own colours."""

    kind: str
    text: str
    about: str = ""
    code: str = ""

    def __repr__(self) -> str:
        body = textwrap.indent("\n\n".join(filter(None, [self.code, self.text])), "  ")
        return f"{SIGNS[self.kind]} {self.kind} · {self.about}\n{body}".rstrip()

    def _repr_html_(self) -> str:
        colour = COLOURS.get(self.kind, "var(--jp-brand-color1, #1976d2)")
        code = f"<pre style='margin:.4em 0'>{html.escape(self.code)}</pre>" if self.code else ""
        text = re.sub(r"`([^`\n]+)`", r"<code>\1</code>", html.escape(self.text))
        return (
            f"<div style='border-left:4px solid {colour};padding:.3em .9em;margin:.3em 0'>"
            f"<b>{SIGNS[self.kind]} {self.kind}</b> <span style='{MUTED}'>"
            f"· {html.escape(self.about)}</span>{code}"
            f"<div style='white-space:pre-wrap'>{text}</div></div>"
        )

    def show(self) -> None:
        """Show the card below the cell, or print it where there is no notebook."""
        display(self)


def wrong(message: str) -> Card:
    """Say which misconception leads to the answer given."""
    return Card(WRONG, message)


def not_yet(
    message: str = "Put your answer in place of `...`, run that cell, then this one.",
) -> Card:
    """Say that the exercise has not been started, and how to start it."""
    return Card(NOT_YET, message)


class Points(float):
    """Be the bare number that nbgrader reads as a cell's mark, and a short line in a notebook."""

    def _repr_html_(self) -> str:
        return f"<span style='{MUTED}'>points: {self:g}</span>"


class Exercise:
    """Check an answer, give hints, show the solution, and remember how far the learner came."""

    def __init__(self, function: Check, points: float, hints: Sequence[str], why: str) -> None:
        self.function, self.points, self.hints, self.why = function, points, hints, why
        self.name, self.question = function.__name__, inspect.getdoc(function) or ""
        self.lesson: Lesson
        self._record: Counter[str] = Counter()

    def __dir__(self) -> list[str]:
        return ["check", "hint", "points", "question", "solution"]  # the rest gives answers away

    def __repr__(self) -> str:
        calls = f".check{inspect.signature(self.function)}  .hint()  .solution()"
        return repr(Card(self.state, f"{self.question}\n{calls}", self.name))

    @property
    def state(self) -> str:
        """Return the best that was reached: right, wrong or not attempted yet."""
        self._remember()
        return RIGHT if self._record["right"] else WRONG if self._record["attempts"] else NOT_YET

    def check(self, *args: Any) -> Points:
        """Say whether the answer is right, wrong (and why) or missing, and return its points."""
        found = self.judge(*args)
        lines, events = [found.text], {RIGHT: ("attempts", "right"), WRONG: ("attempts",)}
        if found.kind == WRONG and (given := [x for x in args if isinstance(x, PLAIN)]):
            lines.append(f"Your answer: {', '.join(map(reprlib.repr, given))}")
        if found.kind in events:
            lines.append(self._remember(*events[found.kind]))
        found._replace(text="\n".join(filter(None, lines)), about=self.name).show()
        return Points(self.points if found.kind == RIGHT else 0)

    def judge(self, *args: Any) -> Card:
        """Return what the check finds; show and remember nothing."""
        try:
            if any(map(_blank, args)):
                return not_yet()
            # One warning on stderr, and nbgrader gives no points for the cell.
            with contextlib.redirect_stderr(io.StringIO()):
                found = self.function(*args)
                found = wrong(found) if isinstance(found, str) else found or wrong("Not quite.")
                return found if isinstance(found, Card) else Card(RIGHT, self.why)
        except LabError as error:
            return wrong(str(error))
        except Exception as error:  # an odd answer may break a check in any way
            kinds = ", ".join(type(value).__name__ for value in args)
            reason = traceback.format_exception_only(error)[-1].strip()
            return wrong(f"The check cannot work with what you gave it ({kinds}): {reason}")

    def hint(self) -> None:
        """Give one more hint, below those already given."""
        note = self._remember("hints")
        asked, total = self._record["hints"], len(self.hints)
        lines = [f"{n}. {text}" for n, text in enumerate(self.hints[:asked], 1)]
        lines += ["There are no more hints."] * (asked > total) + [note] * bool(note)
        Card("hint", "\n".join(lines), f"{self.name} ({min(asked, total)} of {total})").show()

    def solution(self) -> None:
        """Show the lesson's own solution and why it works, once an answer was tried."""
        if self.state == NOT_YET:
            text = "Try it first: the solution opens after your first answer. `.hint()` helps."
            Card("note", text, self.name).show()
        else:
            Card("solution", self.why, self.name, self.lesson.solutions().get(self.name, "")).show()

    def _remember(self, *events: str) -> str:
        key, note = f"{self.lesson.number}.{self.name}", ""
        try:
            with _saved() as state:
                record = Counter(state["exercises"].get(key, self._record)) + Counter(events)
                if events:
                    state["exercises"][key] = record
        except LabError as error:
            record, note = self._record + Counter(events), f"Your progress is not saved: {error}"
        self._record = record
        return note


def exercise(
    *, points: float = 1, hints: Sequence[str] = (), why: str = ""
) -> Callable[[Check], Exercise]:
    """Turn a function that returns True or ``wrong("…")`` into an exercise of its lesson."""
    return lambda function: Exercise(function, points, hints, why)


def _blank(value: Any) -> bool:
    if isinstance(value, list | tuple | set | dict):
        return any(part is ... for part in (value.values() if isinstance(value, dict) else value))
    return value is ... or value is None


class UnknownExercise(LabError, AttributeError):
    """Tell a learner of a misspelt name, and Python of a missing attribute."""


class Exercises:
    """Hold the ``@exercise`` functions of ``exercises_02.py``, beside ``02-some-name.ipynb``."""

    def __init__(self, lesson: Lesson) -> None:
        path = lesson.path.with_name(f"exercises_{lesson.number}.py")
        names = runpy.run_path(str(path)) if path.exists() else {}
        self._all = {x.name: x for x in names.values() if isinstance(x, Exercise)}
        for each in self:
            each.lesson = lesson

    def __getattr__(self, name: str) -> Exercise:
        if name.startswith("_"):  # Python and IPython look for special names and expect this error
            raise AttributeError(name)
        if name not in self._all:
            what = f"this lesson has no exercise {name!r}{nearest(name, self._all)}"
            raise UnknownExercise(what, f"use one of: {', '.join(self._all) or 'none yet'}")
        return self._all[name]

    def __dir__(self) -> list[str]:
        return list(self._all)

    def __iter__(self) -> Iterator[Exercise]:
        return iter(self._all.values())

    def _rows(self) -> list[list[str]]:
        rows = [["exercise", "question", "points", "state"]]
        for each in self:
            state = f"{SIGNS[each.state]} {each.state}"
            rows.append([each.name, each.question, f"{each.points:g}", state])
        return rows

    def __repr__(self) -> str:
        rows = self._rows()
        wide = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.ljust, row, wide)).rstrip() for row in rows)

    def _repr_html_(self) -> str:
        cell = "<td style='text-align:left'>{}</td>"
        rows = ["".join(cell.format(html.escape(text)) for text in row) for row in self._rows()]
        return f"<table><tr>{'</tr><tr>'.join(rows).replace('td', 'th', 8)}</tr></table>"


def exercises(lesson: str | int) -> Exercises:
    """Return the exercises of a lesson: ``exercises("02").where_does_it_land.check(answer)``."""
    return Exercises(find_lesson(lesson))


def progress() -> pd.DataFrame:
    """Return a row for each lesson: exercises right and in all, points and the most there are."""
    with _saved():
        pass  # a folder that cannot be used is an error here, not a row of zeros
    rows = []
    for lesson in lessons():
        every = list(Exercises(lesson))
        right = [each.points for each in every if each.state == RIGHT]
        best = sum(each.points for each in every)
        rows.append([lesson.number, lesson.title, len(right), len(every), sum(right), best])
    return pd.DataFrame(rows, columns=["lesson", "title", "right", "exercises", "points", "of"])


@contextlib.contextmanager
def _saved() -> Iterator[dict[str, dict[str, Any]]]:
    """Lend what the workspace remembers to one process at a time, and write the changes back."""
    path = workspace() / ".progress.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path.with_suffix(".lock"), "a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            old = path.read_bytes() if path.exists() else b'{"exercises": {}, "copies": {}}'
            try:
                state = json.loads(old)
                _ = [n + 1 for record in state["exercises"].values() for n in record.values()]
                _ = state["copies"].items()
            except (ValueError, TypeError, KeyError, AttributeError):
                state = {"exercises": {}, "copies": {}}
                aside = path.rename(_unused(path, ".damaged"))
                text = f"It could not be read and is now {aside}. A new record begins."
                Card("note", text, "saved progress").show()
            yield state
            if (new := json.dumps(state).encode()) != old:
                _write(path, new)
    except OSError as error:
        what = f"the workspace {path.parent} cannot be written: {error.strerror or error}"
        raise LabError(what, "make room, allow writing there, or set LABKIT_WORKSPACE") from None


def _write(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.new")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _unused(path: Path, ending: str) -> Path:
    paths = (path.with_name(f"{path.stem}-{n}{ending}") for n in itertools.count(1))
    return next(path for path in paths if not path.exists())


def prepare_workspace(progress: Progress | None = None) -> Path:
    """Copy the lessons that are missing, refresh those never touched, leave all others alone."""
    copies = {lesson: lesson.cleared() for lesson in lessons()}
    with _saved() as state:
        folder, made = workspace(), state["copies"]
        for lesson, new in copies.items():
            name, theirs = lesson.path.name, folder / lesson.path.name
            if progress:
                progress.step(name)
            fresh = sha256(new).hexdigest()
            found = sha256(theirs.read_bytes()).hexdigest() if theirs.exists() else None
            if found in (None, made.get(name), fresh):
                if found != fresh:
                    _write(theirs, new)
                made[name] = fresh
            elif made.get(name) not in (None, fresh):
                print(f"{name}: yours is kept; for the newer one: labkit restore {lesson.number}")
        for picture in filter(Path.is_file, (course_folder() / "images").rglob("*")):
            _write(folder / picture.relative_to(course_folder()), picture.read_bytes())
    return folder


def restore(lesson: str | int) -> Path:
    """Give a fresh copy of a lesson, and keep the old one under another name."""
    source = find_lesson(lesson)
    new = source.cleared()
    with _saved() as state:
        path = workspace() / source.path.name
        if path.exists() and path.read_bytes() != new:
            kept = _unused(path, ".kept.ipynb")
            _write(kept, path.read_bytes())
            print(f"your old copy is kept as {kept}")
        _write(path, new)
        state["copies"][path.name] = sha256(new).hexdigest()
    return path
