"""The fold on events made by hand: who owned what when, and what cannot be known."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pandas as pd
import pytest

from labkit import LabError
from labkit.watch import trace
from labkit.watch.decode import batch_of, condense
from labkit.watch.fold import Tables

ID = "0f5f6a3e-8f3b-4f0a-9d55-3f4d1a2b3c4d"
Event = dict[str, Any]


class Story:
    """Events of the group "ship" in the order in which they happen, records with log offsets."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._end = 0

    def record(self, at: int, kind: str, detail: Any = None, **more: Any) -> Story:
        text = json.dumps(detail) if detail is not None else None
        place = {"log_partition": 0, "log_offset": self._end}
        self._end += 1
        base = {"group": "ship", "kind": kind, "at": at, "detail": text}
        self.events.append(base | place | more)
        return self

    def generation(self, at: int, _epoch: int = 1, **assigned: list[int]) -> Story:
        """A generation of the classic protocol: members by their client ids."""
        told = [
            {"id": f"id-{m}", "client": m, "host": "/h", "assigned": {"orders": ps} if ps else {}}
            for m, ps in assigned.items()
        ]
        detail = {"protocol": "range", "leader": None, "members": told}
        return self.record(at, "generation", detail, epoch=_epoch)

    def member(self, at: int, member: str, client: str | None = None) -> Story:
        told = {"client": client or member, "host": "/h"}
        return self.record(at, "member", told, member=f"id-{member}")

    def current(
        self, at: int, member: str, has: Iterable[int], revoking: Iterable[int] = (), state: int = 0
    ) -> Story:
        lists = {"assigned": {ID: list(has)}, "revoking": {ID: list(revoking)}}
        detail = lists | {"state": state}
        return self.record(at, "current", detail, member=f"id-{member}", epoch=at)

    def leaves(self, at: int, member: str) -> Story:
        self.record(at, "current", member=f"id-{member}")
        self.record(at, "target", member=f"id-{member}")
        return self.record(at, "member", member=f"id-{member}")

    def commit(self, at: int, partition: int, offset: int | None) -> Story:
        return self.record(at, "commit", topic="orders", partition=partition, offset=offset)

    def report(self, at: int, kind: str, member: str | None, partitions: Any = None) -> Story:
        detail = {} if partitions is None else {"orders": partitions}
        told = {"group": "ship", "kind": kind, "member": member, "at": at}
        self.events.append(told | {"detail": json.dumps(detail)})
        return self

    def topic(self, at: int, name: str | None = "orders", partitions: int = 4) -> Story:
        told = json.dumps({"id": ID, "partitions": partitions})
        self.events.append({"kind": "topic", "topic": name, "at": at, "detail": told})
        return self

    def gone(self, at: int, name: str = "orders") -> Story:
        self.events.append({"kind": "topic", "topic": name, "at": at})
        return self

    def log(self, at: int, partition: int, start: int, end: int) -> Story:
        told = {"kind": "log", "topic": "orders", "partition": partition, "offset": end, "at": at}
        self.events.append(told | {"detail": json.dumps({"start": start})})
        return self


def fold(events: Story | list[Event], window: int = 3_600_000) -> Tables:
    tables = Tables(window)
    batch = batch_of(events.events if isinstance(events, Story) else events)
    tables.take([batch] if batch is not None else [])
    return tables


def owners(tables: Story | Tables, partition: int | None = None) -> list[tuple[Any, ...]]:
    """Return member, since, until, state of a partition; of all, with the partition in front."""
    table = (fold(tables) if isinstance(tables, Story) else tables).ownership("ship")
    for column in ("since", "until"):
        times = [None if t is None or t != t else t.value // 1_000_000 for t in table[column]]
        table[column] = pd.Series(times, dtype=object)
    columns = ["member", "since", "until", "state"]
    if partition is not None:
        table = table[table.partition == partition]
    else:
        columns = ["partition", *columns]
    return list(table[columns].itertuples(index=False, name=None))


def told(tables: Tables) -> str:
    """Return all tables as one text, to compare."""
    return "\n".join(t.to_csv() for t in (tables.offsets(), tables.ownership(), tables.members()))


# --- whose a partition is, and whether its owner works --------------------------------------------


def test_a_partition_is_owned_from_the_coordinators_record_on():
    story = Story().generation(100, a=[0], b=[1])
    assert owners(story) == [(0, "a", 100, None, "owned"), (1, "b", 100, None, "owned")]


def test_a_killed_owner_is_silent_until_the_next_assignment():
    story = Story().generation(100, a=[0], b=[]).report(90, "started", "a")
    story.report(150, "killed", "a").generation(300, b=[0])
    assert owners(story) == [
        (0, "a", 100, 150, "owned"),
        (0, "a", 150, 300, "silent"),
        (0, "b", 300, None, "owned"),
    ]


@pytest.mark.parametrize("fault", ["killed", "died", "failed", "stopped", "left", "frozen"])
def test_every_fault_makes_its_owner_silent_and_shows_in_members(fault):
    tables = fold(Story().generation(100, a=[0]).report(150, fault, "a"))
    assert owners(tables) == [(0, "a", 100, 150, "owned"), (0, "a", 150, None, "silent")]
    assert list(tables.members().state) == [fault]


def test_a_member_thawed_before_its_session_ends_owns_again():
    tables = fold(
        Story().generation(100, a=[0]).report(150, "frozen", "a").report(180, "thawed", "a")
    )
    assert owners(tables) == [
        (0, "a", 100, 150, "owned"),
        (0, "a", 150, 180, "silent"),
        (0, "a", 180, None, "owned"),
    ]
    assert list(tables.members().state) == ["stable"]


def test_a_member_thawed_after_its_session_ended_owns_nothing_until_it_is_given_something():
    story = Story().generation(100, a=[0], b=[1]).report(90, "started", "b")
    story.report(150, "frozen", "a").generation(300, b=[0, 1])
    story.report(400, "thawed", "a").report(410, "lost", "a", [0]).generation(500, a=[0], b=[1])
    assert owners(story, 0) == [
        ("a", 100, 150, "owned"),
        ("a", 150, 300, "silent"),
        ("b", 300, 500, "owned"),
        ("a", 500, None, "owned"),
    ]


def test_a_frozen_member_that_is_given_a_partition_is_silent_from_the_start():
    story = Story().report(50, "frozen", "a").member(90, "a").topic(90).current(100, "a", [0])
    assert owners(story) == [(0, "a", 100, None, "silent")]


def test_a_member_started_again_owns_from_its_next_assignment_on():
    story = Story().generation(100, a=[0]).report(150, "killed", "a").report(200, "started", "a")
    assert owners(story)[-1] == (0, "a", 150, None, "silent")
    story.generation(230, a=[0])
    assert owners(story)[-2:] == [(0, "a", 150, 230, "silent"), (0, "a", 230, None, "owned")]


def test_a_static_member_started_again_without_a_new_generation_owns_when_it_says_so():
    story = Story().generation(100, a=[0]).report(150, "killed", "a").report(200, "started", "a")
    story.report(230, "assigned", "a", [0])
    assert owners(story)[-2:] == [(0, "a", 150, 230, "silent"), (0, "a", 230, None, "owned")]


def test_an_eager_rebalance_shows_when_nobody_worked():
    story = Story().generation(100, a=[0, 1]).report(101, "assigned", "a", [0, 1])
    story.report(150, "revoked", "a", [0, 1]).generation(200, a=[0], b=[1])
    story.report(201, "assigned", "a", [0]).report(202, "assigned", "b", [1])
    assert owners(story) == [
        (0, "a", 100, 150, "owned"),
        (0, None, 150, 200, "unowned"),
        (0, "a", 200, None, "owned"),
        (1, "a", 100, 150, "owned"),
        (1, None, 150, 200, "unowned"),
        (1, "b", 200, None, "owned"),
    ]


def test_of_an_eager_rebalance_of_others_members_the_gap_is_unknown():
    story = Story().generation(100, a=[0, 1]).commit(130, 0, 5).generation(200, a=[0], b=[1])
    assert owners(story) == [
        (0, "a", 100, 130, "owned"),
        (0, None, 130, 200, "unknown"),
        (0, "a", 200, None, "owned"),
        (1, None, 100, 200, "unknown"),
        (1, "b", 200, None, "owned"),
    ]


def test_a_commit_in_the_very_moment_of_the_next_generation_leaves_no_gap():
    story = Story().generation(100, a=[0]).commit(200, 0, 5).generation(200, a=[0])
    assert owners(story) == [(0, "a", 100, None, "owned")]


def test_a_cooperative_rebalance_moves_only_what_it_has_to():
    story = Story().generation(100, a=[0, 1]).report(101, "assigned", "a", [0, 1])
    story.generation(200, a=[0], b=[]).report(205, "revoked", "a", [1])
    story.generation(300, a=[0], b=[1]).report(301, "assigned", "b", [1])
    assert owners(story) == [
        (0, "a", 100, None, "owned"),
        (1, "a", 100, 200, "owned"),
        (1, None, 200, 300, "unowned"),
        (1, "b", 300, None, "owned"),
    ]


def test_the_server_side_protocol_keeps_the_owner_until_it_has_given_up():
    story = Story().topic(90).member(95, "a").current(100, "a", [0, 1]).member(150, "b")
    story.current(160, "b", [], state=2).current(170, "a", [0], [1], state=1)
    tables = fold(story)
    assert owners(tables) == [(0, "a", 100, None, "owned"), (1, "a", 100, None, "owned")]
    states = dict(zip(tables.members().member, tables.members().state))
    assert states == {"a": "giving up partitions", "b": "waiting for partitions"}
    story.report(180, "revoked", "a", [1]).current(190, "a", [0]).current(220, "b", [1])
    assert owners(story) == [
        (0, "a", 100, None, "owned"),
        (1, "a", 100, 180, "owned"),
        (1, None, 180, 220, "unowned"),
        (1, "b", 220, None, "owned"),
    ]


def test_gaps_of_the_server_side_protocol_are_read_from_the_records_of_others_members():
    story = Story().topic(90).member(95, "a").current(100, "a", [0]).leaves(200, "a")
    story.member(250, "b").current(260, "b", [0]).commit(270, 0, 1)
    assert owners(story) == [
        (0, "a", 100, 200, "owned"),
        (0, None, 200, 260, "unowned"),
        (0, "b", 260, None, "owned"),
    ]


def test_a_group_that_empties_leaves_its_partitions_unowned():
    story = Story().generation(100, a=[0]).report(90, "started", "a").generation(200)
    tables = fold(story)
    assert owners(tables) == [(0, "a", 100, 200, "owned"), (0, None, 200, None, "unowned")]
    assert tables.members("ship").empty
    story.record(300, "generation")  # and is forgotten
    assert owners(story)[-1] == (0, None, 200, None, "unowned")


def test_reports_may_come_before_or_after_the_coordinators_records():
    story = Story().generation(100, a=[0, 1]).report(101, "assigned", "a", [0, 1])
    story.report(150, "revoked", "a", [0, 1]).generation(200, a=[0], b=[1])
    story.report(201, "assigned", "a", [0]).report(202, "assigned", "b", [1])
    story.report(250, "frozen", "b").report(270, "thawed", "b").report(290, "killed", "a")
    story.generation(400, b=[0, 1]).report(401, "assigned", "b", [0, 1])
    expected = told(fold(story))
    assert "silent" in expected and "unowned" in expected
    for seed in range(40):
        assert told(fold(with_late_reports(story.events, random.Random(seed)))) == expected


def with_late_reports(events: list[Event], rng: random.Random) -> list[Event]:
    """Shuffle the reports among the records, which keep their order."""
    shuffled = rng.sample(events, len(events))
    records = iter([event for event in events if "log_offset" in event])
    return [next(records) if "log_offset" in event else event for event in shuffled]


def test_two_owners_in_the_records_are_shown_as_two():
    classic = Story().generation(100, a=[0], b=[0])
    assert sorted(owners(classic)) == [(0, "a", 100, None, "owned"), (0, "b", 100, None, "owned")]
    server = Story().topic(90).member(90, "a").member(90, "b")
    server.current(100, "a", [0]).current(150, "b", [0]).current(200, "a", [])
    assert owners(server) == [(0, "a", 100, 200, "owned"), (0, "b", 150, None, "owned")]


def test_a_record_that_is_read_twice_changes_nothing():
    story = (
        Story().generation(100, a=[0]).commit(110, 0, 3).generation(200, b=[0]).commit(210, 0, 7)
    )
    tables = fold(story)
    expected = told(tables)
    for again in (story.events[:3], story.events[:1], story.events[1:2]):
        tables.take([batch_of(again)])
        assert told(tables) == expected


def test_brokers_whose_clocks_differ_make_no_overlap():
    story = Story().generation(100, a=[0]).generation(200, b=[0]).generation(180, a=[0])
    story.generation(300, a=[0])
    spans = owners(story, 0)
    assert all(before[2] <= after[1] for before, after in pairwise(spans))
    assert spans[-1][:3] == ("a", 300, None)


# --- groups that change their protocol ------------------------------------------------------------


def test_a_group_that_goes_over_to_the_server_side_protocol_has_one_owner_a_partition():
    story = Story().topic(50).generation(100, a=[0]).report(90, "started", "a").generation(200)
    story.record(250, "generation").member(260, "b").current(300, "b", [0])
    story.report(310, "position", "b", {"0": 7})
    assert owners(story, 0) == [
        ("a", 100, 200, "owned"),
        (None, 200, 300, "unowned"),
        ("b", 300, None, "owned"),
    ]
    story.leaves(400, "b").report(410, "started", "a").generation(500, a=[0])
    story.report(510, "position", "a", {"0": 9}).generation(600, a=[0])
    tables = fold(story)
    assert owners(tables, 0)[2:] == [
        ("b", 300, 400, "owned"),
        (None, 400, 500, "unowned"),
        ("a", 500, None, "owned"),
    ]
    assert list(tables.offsets().position) == [9]


def test_a_member_whose_name_compaction_left_behind_its_partitions_is_known_by_both():
    story = Story().topic(50).current(100, "a", [0])
    assert owners(story) == [(0, "id-a", 100, None, "owned")]
    story.member(150, "a")
    tables = fold(story)
    assert owners(tables) == [(0, "a", 100, None, "owned")]
    assert list(tables.members().protocol) == ["consumer"]


# --- offsets --------------------------------------------------------------------------------------


def numbers(tables: Story | Tables) -> list[tuple[Any, ...]]:
    """Return partition, start, committed, position, end, lag."""
    table = (fold(tables) if isinstance(tables, Story) else tables).offsets("ship")
    table = table[["partition", "start", "committed", "position", "end", "lag"]].astype(object)
    table = table.where(table.notna(), None)
    return list(table.itertuples(index=False, name=None))


def test_offsets_join_commits_positions_and_the_ends_of_logs():
    story = Story().topic(50).generation(100, a=[0, 1]).log(110, 0, 2, 50).commit(120, 0, 40)
    story.report(125, "position", "a", {"0": 45})
    assert numbers(story) == [(0, 2, 40, 45, 50, 10), (1, None, None, None, None, None)]


def test_a_commit_that_is_newer_than_the_sampled_end_has_no_negative_lag():
    assert numbers(Story().log(110, 0, 0, 50).commit(120, 0, 60)) == [(0, 0, 60, None, 60, 0)]


def test_the_position_of_a_member_that_lost_the_partition_is_not_shown():
    story = Story().generation(100, a=[0]).report(110, "position", "a", {"0": 5}).commit(120, 0, 4)
    assert numbers(story)[0][3] == 5
    assert numbers(story.generation(200, b=[0]))[0][3] is None


def test_a_forgotten_commit_leaves_the_table():
    story = Story().commit(100, 0, 5).commit(100, 1, 6)
    assert [row[0] for row in numbers(story)] == [0, 1]
    assert [row[0] for row in numbers(story.commit(200, 0, None))] == [1]


def test_an_older_commit_that_is_read_later_does_not_count():
    story = Story().commit(100, 0, 5).commit(110, 0, 9)
    assert numbers(fold(story.events[::-1])) == numbers(story)
    assert numbers(story)[0][2] == 9


def test_a_commit_held_up_by_a_transaction_still_says_that_its_owner_worked_then():
    story = Story().generation(100, a=[0]).commit(130, 0, 5).generation(200, b=[0])
    story.commit(250, 0, 6).generation(300, b=[0])
    late = story.events[0:1] + story.events[2:] + story.events[1:2]
    assert told(fold(late)) == told(fold(story))
    assert owners(story, 0)[0] == ("a", 100, 130, "owned")


def test_a_deleted_topic_leaves_the_offsets_and_ends_its_ownership():
    story = Story().topic(50).generation(100, a=[0]).report(90, "started", "a").commit(120, 0, 1)
    tables = fold(story.gone(200))
    assert tables.offsets().empty
    assert owners(tables) == [(0, "a", 100, 200, "owned")]
    story.topic(300).commit(310, 0, 2).generation(320, a=[0])
    assert numbers(story)[0][2] == 2
    assert owners(story)[-1] == (0, "a", 320, None, "owned")


# --- members and groups ---------------------------------------------------------------------------


def test_members_that_share_a_client_id_keep_their_names():
    def both(at: int, *ids: str) -> Event:
        told = [{"id": i, "client": "rdkafka", "host": "/h", "assigned": {}} for i in ids]
        detail = json.dumps({"protocol": "range", "leader": None, "members": told})
        return {"group": "ship", "kind": "generation", "at": at, "epoch": at, "detail": detail}

    def names(tables: Tables) -> dict[str, str]:
        return dict(zip(tables.members().id, tables.members().member))

    tables = fold([both(100, "x", "y")])
    assert names(tables) == {"x": "rdkafka", "y": "y"}
    tables.take([batch_of([both(200, "z", "y", "x")])])
    assert names(tables) == {"x": "rdkafka", "y": "y", "z": "z"}
    tables.take([batch_of([both(300, "y", "z")])])
    assert names(tables) == {"y": "y", "z": "z"}
    tables.take([batch_of([both(400, "w", "y")])])
    assert names(tables) == {"y": "y", "w": "rdkafka"}


def test_members_of_a_share_group_may_have_the_same_partition():
    story = Story()
    for name in "ab":
        told = {"client": name, "host": "/h"}
        story.record(90, "share member", told, member=name)
        detail = {"state": 0, "assigned": {ID: [0]}, "revoking": {}}
        story.record(100, "share current", detail, member=name, epoch=3)
    tables = fold(story.topic(80))
    assert sorted(owners(tables)) == [(0, "a", 100, None, "owned"), (0, "b", 100, None, "owned")]
    assert set(tables.members().protocol) == {"share"} and tables.offsets().empty


def test_a_group_that_was_never_seen_is_an_error_that_names_the_nearest():
    tables = fold(Story().commit(100, 0, 1))
    for table in (tables.offsets, tables.ownership, tables.members):
        with pytest.raises(LabError, match="no group 'shop' has been seen") as error:
            table("shop")
        assert "did you mean 'ship'?" in error.value.what and "ship" in error.value.to_do
    with pytest.raises(LabError) as error:
        Tables().offsets("x")
    assert error.value.to_do == "the groups seen so far: none yet"


def test_tables_of_nothing_are_empty_and_have_their_columns():
    tables = Tables()
    assert list(tables.offsets())[3:8] == ["start", "committed", "position", "end", "lag"]
    assert list(tables.ownership())[:4] == ["group", "topic", "partition", "member"]
    assert list(tables.members())[-2:] == ["epoch", "state"]
    assert tables.offsets().empty and tables.ownership().empty and tables.members().empty


def test_records_that_were_not_understood_are_noted():
    why = {"why": "type 99 of its key is not known", "key": "", "value": ""}
    story = Story().record(100, "unknown", why)
    story.events.append({"kind": "unknown", "at": 100, "detail": json.dumps(why)})
    assert len(fold(story).unknown) == 2
    assert len(fold(Story().events + story.events * 200).unknown) == 100


# --- memory ---------------------------------------------------------------------------------------


def test_history_is_kept_for_the_window_and_what_is_current_for_ever():
    story = Story().generation(100, a=[0], b=[1]).report(101, "frozen", "b").commit(110, 0, 5)
    for at in range(1000, 3000, 100):
        story.generation(at, a=[0], b=[1])
        story.report(at + 1, "revoked", "a", [0]).report(at + 50, "assigned", "a", [0])
    tables = fold(story, window=500)
    before = owners(tables)
    assert sum(map(len, tables.groups["ship"].past.values())) == 40
    tables.forget()
    assert sum(map(len, tables.groups["ship"].past.values())) <= 12
    assert sum(map(len, tables.groups["ship"].reports.values())) <= 16
    assert owners(tables) == before
    assert before[-1][0] == 1 and before[-1][3:] == (None, "silent")
    assert [row[2] for row in numbers(tables)][:1] == [5] and len(tables.members()) == 2


def test_a_fault_longer_ago_than_the_window_still_shows():
    story = Story().generation(100, a=[0], b=[1]).report(150, "killed", "a")
    story.generation(9_000, b=[0, 1]).commit(9_100, 0, 1)
    tables = fold(story, window=500)
    expected = owners(tables, 0)
    assert expected[:2] == [("a", 100, 150, "owned"), ("a", 150, 9_000, "silent")]
    tables.forget()
    assert owners(tables, 0) == expected


# --- random stories -------------------------------------------------------------------------------


def random_story(rng: random.Random, steps: int = 80) -> Story:
    """Return a story in which the coordinator never gives a partition to two members."""
    story, at, offset, names = Story(), 1000, 0, "abcd"
    classic, inside, has = rng.random() < 0.5, set[str](), dict[int, str]()
    story.topic(at)
    for _ in range(steps):
        at += rng.choice([0, 1, 5, 40, 300])
        what = rng.choice(["records", "records", "commit", "report", "report", "log", "protocol"])
        if what == "commit":
            offset += rng.randrange(5)
            story.commit(at, rng.randrange(4), rng.choice([offset, offset, offset, None]))
        elif what == "log":
            story.log(at, rng.randrange(4), 0, offset + rng.randrange(3))
        elif what == "report":
            member, kinds = rng.choice(names), ["assigned", "revoked", "lost", "started", "killed"]
            kind = rng.choice([*kinds, "frozen", "thawed", "left", "slowed", "position"])
            places = rng.sample(range(4), rng.randrange(4))
            if kind == "position":
                story.report(at, kind, member, {str(p): offset for p in places})
            else:
                listed = kind in ("assigned", "revoked", "lost")
                story.report(at, kind, member, places if listed else None)
        elif what == "protocol" and rng.random() < 0.3:
            if classic:
                story.generation(at).record(at, "generation")
            else:
                for member in sorted(inside):
                    story.leaves(at, member)
            classic, inside, has = not classic, set(), {}
        elif classic:
            inside = set(rng.sample(names, rng.randrange(5)))
            has = {p: rng.choice(sorted(inside)) for p in range(4) if inside and rng.random() < 0.8}
            story.generation(at, **{m: [p for p in has if has[p] == m] for m in sorted(inside)})
        else:
            member = rng.choice(names)
            if member not in inside:
                inside.add(member)
                story.member(at, member)
            elif rng.random() < 0.2:
                inside.discard(member)
                has = {p: m for p, m in has.items() if m != member}
                story.leaves(at, member)
                continue
            kept = [p for p, m in has.items() if m == member and rng.random() < 0.7]
            free = [p for p in range(4) if p not in has and rng.random() < 0.6]
            revoking = [p for p in kept if rng.random() < 0.3]
            has = {p: m for p, m in has.items() if m != member or p in kept}
            has |= dict.fromkeys(free, member)
            story.current(at, member, {*kept, *free} - set(revoking), revoking)
    return story


def overlaps(tables: Tables) -> list[tuple[Any, ...]]:
    """Return pairs of rows of one partition that are true at the same time."""
    found = []
    for partition in range(4):
        rows = owners(tables, partition)
        for row in rows:
            assert row[2] is None or row[1] < row[2], row
        for before, after in pairwise(rows):
            if before[2] is None or before[2] > after[1]:
                found.append((before, after))
    return found


@pytest.mark.parametrize("seed", range(60))
def test_random_stories_never_show_two_owners_that_the_records_do_not(seed):
    assert overlaps(fold(random_story(random.Random(seed)))) == []


def test_a_record_that_gives_a_partition_twice_shows_in_a_random_story():
    story = random_story(random.Random(1))
    at = max(event["at"] for event in story.events) + 1
    assert overlaps(fold(story.generation(at, a=[0, 1], b=[0, 2]).generation(at + 5, c=[0])))


@pytest.mark.parametrize("seed", range(30))
def test_random_stories_survive_json(seed):
    tables = fold(random_story(random.Random(seed)))
    again = Tables.from_json(tables.to_json())
    assert told(again) == told(tables) and again.to_json() == tables.to_json()
    more = random_story(random.Random(seed + 1000))
    for t in (tables, again):
        t.take([batch_of(more.events)])
    assert told(again) == told(tables)


@pytest.mark.parametrize("seed", range(30))
def test_random_stories_in_other_batches_give_the_same_tables(seed):
    rng = random.Random(seed)
    events = random_story(rng).events
    cuts = sorted(rng.choices(range(len(events) + 1), k=12))
    batches = [batch_of(events[a:b]) for a, b in zip([0, *cuts], [*cuts, len(events)])]
    one, many = fold(events), Tables()
    for batch in batches:
        many.take([batch] if batch is not None else [])
    assert told(one) == told(many)


@pytest.mark.parametrize("seed", range(30))
def test_random_stories_without_the_commits_that_others_follow_give_the_same_tables(seed):
    rng, story = random.Random(seed), Story()
    for event in random_story(rng, 150).events:
        if event["kind"] == "commit":  # many at once, as where a member commits each record
            for _ in range(rng.randrange(10, 40)):
                offset = rng.choice([rng.randrange(1000), rng.randrange(1000), None])
                story.commit(event["at"], rng.randrange(4), offset)
        elif event.get("log_offset") is not None:
            names = {name: event[name] for name in ("member", "epoch") if name in event}
            detail = event["detail"] and json.loads(event["detail"])
            story.record(event["at"], event["kind"], detail, **names)
    at_once, one_by_one = fold(story), Tables()
    for event in story.events:
        one_by_one.take([batch_of([event])])
    (condensed,) = condense(iter([batch_of(story.events)]))
    assert condensed.num_rows < len(story.events)
    assert told(at_once) == told(one_by_one)


@pytest.mark.parametrize("seed", range(30))
def test_random_stories_with_late_reports_give_the_same_tables(seed):
    rng = random.Random(seed)
    events = [e for e in random_story(rng).events if e["kind"] not in ("position", "log")]
    moments = iter(range(10_000_000))
    for event in events:  # no two at once: which of them came first is then in doubt
        event["at"] = event["at"] * 1000 + next(moments)
    shuffled = with_late_reports(events, rng)
    window = 10_000_000_000
    assert told(fold(events, window)) == told(fold(shuffled, window))


@pytest.mark.parametrize("seed", range(40))
def test_random_stories_trimmed_and_saved_give_the_tables_of_the_watch(seed, tmp_path, monkeypatch):
    monkeypatch.setattr(trace, "CHUNK", 2)
    rng = random.Random(seed)
    events = random_story(rng, 200).events
    live, history = Tables(900), trace.History(900)
    while events:
        some, events = events[:3], events[3:]
        batch = batch_of(some)
        live.take([batch])
        history.add(batch)
        if rng.random() < 0.3:
            live.forget()
            history.trim(most=rng.choice([10, 40, 1000]))
    opened = trace.open(history.save(tmp_path / "run.trace"))
    assert told(opened._tables) == told(live)
    assert opened._events.num_rows < 200
