"""The live view: it tells a page what changed four times a second, and leaves a picture behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from labkit.errors import LabError
from labkit.progress import in_notebook
from labkit.views.timeline import offsets_figure, offsets_summary, timeline, timeline_summary

if TYPE_CHECKING:
    from labkit.watch.fold import Tables
    from labkit.watch.group import Group as Known

EVERY = 0.25  # seconds
ANSWER_WITHIN = 3.0  # seconds in which a page, if there is one, has said hello
STORED_SECONDS = 120.0  # of history in the picture that a notebook keeps


class Frames:
    """What a page knows of some groups, so that it is told only what is new."""

    def __init__(self, only: str | None = None) -> None:
        self.only = only
        self._groups: dict[str, dict[str, Any]] = {}

    def next(self, tables: Tables) -> dict[str, Any]:
        """Return what changed since the last time."""
        told: dict[str, Any] = {"now": tables.now, "revision": tables.revision, "groups": {}}
        for name, group in sorted(tables.groups.items()):
            if self.only in (None, name):
                changes = self._group(tables, group)
                if changes:
                    told["groups"][name] = changes
        return told

    def _group(self, tables: Tables, group: Known) -> dict[str, Any]:
        known = self._groups.setdefault(
            group.name, {"prints": {}, "offsets": {}, "members": [], "marks": 0, "guess": {}}
        )
        told: dict[str, Any] = {}
        lanes = self._changed_lanes(tables, group, known, told)
        if lanes:
            told["lanes"] = lanes
        offsets = {
            f"{topic}-{partition}": [start, committed, position, end]
            for topic, partition, start, committed, position, end, _, _ in tables.progress(group)
        }
        moved = {lane: row for lane, row in offsets.items() if known["offsets"].get(lane) != row}
        if moved:
            known["offsets"], told["offsets"] = offsets, moved
        marks = len(group.marks) + sum(map(len, group.reports.values()))
        if marks != known["marks"]:
            known["marks"], told["marks"] = marks, group.events(tables.now - tables.window)
        if group.guess != known["guess"]:
            known["guess"] = told["guess"] = dict(group.guess)
        if lanes or "marks" in told:
            told["summary"] = self._summary(tables, group)
        return told

    def _changed_lanes(
        self, tables: Tables, group: Known, known: dict[str, Any], told: dict[str, Any]
    ) -> dict[str, list[Any]]:
        raw: dict[str, set[Any]] = {}
        prints: dict[str, list[Any]] = {}
        for place in group.past.keys() | group.owners.keys():
            lane = f"{tables.ids.get(place[0], place[0])}-{place[1]}"
            past, owners = group.past.get(place, []), group.owners.get(place, {})
            # What the place's picture depends on: its spans, and what their members reported.
            people = [past[-1][0] if past else None, *owners]
            heard = [len(group.reports.get(member or "", ())) for member in people]
            since = [span[0] for span in owners.values()]
            raw.setdefault(lane, set()).add(place)
            prints.setdefault(lane, []).append((place, len(past), people, since, heard))
        changed = [lane for lane, found in prints.items() if known["prints"].get(lane) != found]
        gone = [lane for lane in known["prints"] if lane not in prints]
        if gone:
            told["gone"] = gone
        known["prints"] = prints
        begin, lanes = tables.now - tables.window, {}
        for lane in changed:
            spans = list(group.spans(tables.ids, begin, raw[lane]))
            lanes[lane] = [
                [since, until, member, state] for _, _, member, since, until, state in spans
            ]
            for _, _, member, *_ in spans:
                if member is not None and member not in known["members"]:
                    known["members"].append(member)
                    told["members"] = known["members"]
        return lanes

    def _summary(self, tables: Tables, group: Known) -> str:
        owners = tables.ownership(group.name)
        if len(owners) > 5000:  # a sentence that nobody would read to its end
            return (
                f"Group {group.name}: {len(group.owners)} partitions, {len(group.members)} members."
            )
        return timeline_summary(owners, tables.marks(group.name), group.name)


def picture(tables: Tables, only: str | None) -> dict[str, str]:
    """Return what a notebook keeps of a view: a drawing, and its text for who cannot see it."""
    drawn, said = [], []
    for name in sorted(tables.groups):
        if only in (None, name):
            owners, marks = tables.ownership(name), tables.marks(name)
            offsets = tables.offsets(name)
            guess = {
                (lane.rpartition("-")[0], int(lane.rpartition("-")[2])): member
                for lane, member in tables.groups[name].guess.items()
            }
            drawn.append(timeline(owners, marks, name, seconds=STORED_SECONDS, guess=guess))
            drawn.append(offsets_figure(offsets, name))
            said += [timeline_summary(owners, marks, name), offsets_summary(offsets, name)]
    text = "\n".join(said) or "No group has been seen yet."
    html = "".join(f"<div>{svg}</div>" for svg in drawn) or f"<p>{text}</p>"
    return {"text/html": html, "text/plain": text}


class View:
    """One picture on the page: live or of the past, and a drawing once it is over."""

    def __init__(
        self,
        tables: Callable[[], Any],  # a context manager that gives the tables and keeps them still
        only: str | None = None,
        actions: dict[str, Callable[[dict[str, Any]], Any]] | None = None,
        choices: Callable[[], dict[str, Any]] = dict,
        past: bool = False,
    ) -> None:
        self._tables, self._only, self._past = tables, only, past
        self._actions, self._choices = actions or {}, choices
        self._frames, self._over = Frames(only), threading.Event()
        self._pages, self._shown_at = 0, time.monotonic()
        self._lock = threading.Lock()  # a page may ask for all while the next change is told
        self._handle: Any = None
        self._display()

    def _display(self) -> None:
        if not in_notebook():
            print(self._picture()["text/plain"])
            self._over.set()
            return
        from IPython import get_ipython
        from IPython.display import display

        self._widget = _widget()
        self._widget.on_msg(self._heard)
        self._handle = display(self._widget, display_id=True)
        if self._past:
            get_ipython().events.register("post_run_cell", self._settle)
        else:
            threading.Thread(target=self._run, name="labkit-view", daemon=True).start()

    def _settle(self, _: Any = None) -> None:
        """Leave the drawing where no page has answered: nobody is there to slide it."""
        if not self._pages and time.monotonic() - self._shown_at > ANSWER_WITHIN:
            self.end()

    def _run(self) -> None:
        while not self._over.wait(EVERY):
            if self._pages:
                self._tell(whole=False)

    def _tell(self, whole: bool, said: str = "") -> None:
        with self._lock:
            if whole:
                self._frames = Frames(self._only)
            with self._tables() as tables:
                told = self._frames.next(tables)
                if whole and self._past:
                    events = [e for g in tables.groups.values() for e in g.events(0)]
                    told |= {"first": min((e[0] for e in events), default=tables.now - 1000)}
                    told |= {"marks": events}
            told |= self._choices() | {"whole": whole, "controls": bool(self._actions)}
            told |= {"group": self._only, "said": said}
            self._widget.send(told)

    def _heard(self, widget: Any, message: dict[str, Any], buffers: Any) -> None:
        if message["do"] == "hello":
            self._pages += 1
            self._tell(whole=True)
        elif message["do"] in self._actions:  # in a thread: what takes seconds must stop nobody
            threading.Thread(target=self._act, args=(message,), daemon=True).start()

    def _act(self, message: dict[str, Any]) -> None:
        what = message.pop("do")
        try:
            self._actions[what](message)
            said = f"{what} {' '.join(str(value) for value in message.values())}: done"
        except LabError as error:
            said = f"{error.what}; {error.to_do}"
        self._tell(whole=False, said=said)

    def _picture(self) -> dict[str, str]:
        with self._tables() as tables:
            return picture(tables, self._only)

    def end(self) -> None:
        """Replace what moves by a drawing of its last state, which the notebook stores."""
        if self._over.is_set():
            return
        self._over.set()
        with self._lock:
            if self._past:
                from IPython import get_ipython

                get_ipython().events.unregister("post_run_cell", self._settle)
            self._handle.update(self._picture(), raw=True)
            self._widget.close()

    def __repr__(self) -> str:
        return "" if self._handle else "a view"


def show_group(group: Any) -> View:
    """Show a group of ours, with buttons for its verbs and its cluster's."""
    cluster = group._cluster
    actions: dict[str, Callable[[dict[str, Any]], Any]] = {
        "add member": lambda told: group.add(),
        "stop member": lambda told: group.stop(told["member"]),
        "kill member": lambda told: group.kill(told["member"]),
        "freeze member": lambda told: group.freeze(told["member"]),
        "thaw member": lambda told: group.thaw(told["member"]),
        "kill broker": lambda told: cluster.kill(told["broker"]),
        "restart broker": lambda told: cluster.restart(told["broker"]),
        "reset group": lambda told: group.reset(by=told["by"]),
    }

    def choices() -> dict[str, Any]:
        try:
            table = group.members
            alive = list(table[table.state.isin(["running", "frozen"])].member)
            return {"people": alive, "brokers": cluster.brokers}
        except LabError:  # closed meanwhile
            return {"people": [], "brokers": []}

    view: View = cluster.watch().show(group.name, actions=actions, choices=choices)
    return view


def _widget() -> Any:
    import anywidget

    here = Path(__file__).parent
    files = {"_esm": (here / "live.js").read_text(), "_css": (here / "live.css").read_text()}
    return type("LiveView", (anywidget.AnyWidget,), files)()
