"""The live view's frames and drawings say what the tables say."""

from __future__ import annotations

import json
from typing import Any
from xml.etree import ElementTree

import pandas as pd
import pytest

from labkit.views.live import Frames, picture
from labkit.views.timeline import log_figure, offsets_figure, timeline
from labkit.watch.decode import batch_of
from labkit.watch.fold import Tables

SVG = "{http://www.w3.org/2000/svg}"


def generation(epoch: int, at: int, place: int, **assigned: list[int]) -> dict[str, Any]:
    members = [
        {"id": f"id-{name}", "client": f"ship-{name}", "host": "/h", "assigned": {"orders": parts}}
        for name, parts in assigned.items()
    ]
    detail = json.dumps({"protocol": "range", "leader": None, "members": members})
    return {"group": "ship", "kind": "generation", "epoch": epoch, "detail": detail, "at": at} | {
        "log_partition": 0,
        "log_offset": place,
    }


def report(kind: str, member: str, at: int, detail: Any = None) -> dict[str, Any]:
    told = {"group": "ship", "kind": kind, "member": member, "at": at}
    return told | {"detail": json.dumps(detail or {})}


def commit(partition: int, offset: int, at: int, place: int) -> dict[str, Any]:
    told = {"group": "ship", "kind": "commit", "topic": "orders", "partition": partition}
    return told | {"offset": offset, "at": at, "log_partition": 0, "log_offset": place}


def ends(end: int, at: int) -> list[dict[str, Any]]:
    detail = json.dumps({"start": 0, "leader": 1, "isr": [1]})
    return [
        {
            "kind": "log",
            "topic": "orders",
            "partition": p,
            "offset": end,
            "at": at,
            "detail": detail,
        }
        for p in (0, 1)
    ]


@pytest.fixture
def tables() -> Tables:
    """Two members; one is killed, and three seconds later the other has everything."""
    made = Tables()
    story = [
        generation(1, 1_000, 1, a=[0], b=[1]),
        report("assigned", "ship-a", 1_010, {"orders": [0]}),
        report("assigned", "ship-b", 1_010, {"orders": [1]}),
        *ends(10, 1_500),
        commit(0, 4, 2_000, 2),
        commit(1, 10, 2_000, 3),
        report("killed", "ship-a", 5_000),
        generation(2, 8_000, 4, b=[0, 1]),
        report("predicted", "", 8_100, {"orders": {"0": "ship-b"}}),
    ]
    made.take([batch_of(story)])
    return made


def bars(frames: dict[str, Any]) -> set[Any]:
    lanes = frames["groups"].get("ship", {}).get("lanes", {})
    return {(lane, *bar) for lane, found in lanes.items() for bar in found}


def rows(tables: Tables) -> set[Any]:
    def ms(at: Any) -> int | None:
        return None if pd.isna(at) else int(at.timestamp() * 1000)

    return {
        (f"{r.topic}-{r.partition}", ms(r.since), ms(r.until), r.member, r.state)
        for r in tables.ownership("ship").itertuples()
    }


def test_a_page_is_told_the_table_once_and_then_what_changed(tables):
    frames = Frames("ship")
    assert bars(frames.next(tables)) == rows(tables)
    assert frames.next(tables)["groups"] == {}
    tables.take([batch_of([commit(0, 5, 9_000, 5)])])
    told = frames.next(tables)["groups"]["ship"]
    assert set(told) == {"offsets"} and told["offsets"] == {"orders-0": [0, 5, None, 10]}
    tables.take([batch_of([generation(3, 9_500, 6, b=[1], c=[0])])])
    told = frames.next(tables)
    assert {lane for lane, *_ in bars(told)} == {"orders-0", "orders-1"}
    assert bars(told) == rows(tables)
    assert bars(Frames().next(tables)) == rows(tables)  # a page that is opened again


def test_a_frame_says_in_words_what_it_shows(tables):
    told = Frames("ship").next(tables)["groups"]["ship"]
    assert "ship-b owns 0, 1" in told["summary"] and "ship-a killed" in told["summary"]
    assert "unserved for 3.0 s" in told["summary"]
    assert told["guess"] == {"orders-0": "ship-b"}
    assert [5_000, "killed", "ship-a"] in told["marks"]
    assert Frames("other").next(tables)["groups"] == {}


def test_the_drawing_has_a_bar_for_every_row_and_names_in_it(tables):
    owners, marks = tables.ownership("ship"), tables.marks("ship")
    drawn = ElementTree.fromstring(timeline(owners, marks, "ship", guess={("orders", 0): "ship-b"}))
    found = [rect for rect in drawn.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    assert len(found) == len(owners)
    words = [text.text for text in drawn.iter(f"{SVG}text")]
    assert "ship-a" in words and "your guess: ship-b" in words
    assert "ship-b owns 0, 1" in drawn.get("aria-label")
    widths = sorted(float(rect.get("width")) for rect in found)
    assert widths[0] > 0


def test_nothing_to_draw_is_said(tables):
    empty = Tables()
    assert "No group" in picture(empty, None)["text/plain"]
    owners, marks = tables.ownership("ship").head(0), tables.marks("ship").head(0)
    assert "owns nothing yet" in timeline(owners, marks, "ship")


def test_what_a_notebook_stores_is_small_and_says_the_lag(tables):
    kept = picture(tables, "ship")
    assert "6 records behind, most on orders-0 (6)" in kept["text/plain"]
    assert len(kept["text/html"]) < 20_000
    drawn = ElementTree.fromstring(offsets_figure(tables.offsets("ship"), "ship"))
    words = [text.text for text in drawn.iter(f"{SVG}text")]
    assert "lag 6 of 10" in words and "lag 0 of 10" in words


def test_the_log_is_a_row_of_cells_with_pointers():
    records = pd.DataFrame({"offset": range(5), "key": ["berlin", "rome", "oslo", "bern", "<a&b>"]})
    groups = pd.DataFrame({"group": ["ship"], "committed": [3]})
    drawn = ElementTree.fromstring(log_figure(records, groups, "orders-0"))
    words = [text.text for text in drawn.iter(f"{SVG}text")]
    assert "▲ ship reads 3 next" in words and "<a&b>" in words
