"""The cluster map tells the tables' facts, in shapes and in words."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from collections import Counter
from typing import Any

import pandas as pd
import pytest

from labkit.views import MOST_CELLS, cluster_map, cluster_summary

SVG = "{http://www.w3.org/2000/svg}"
BOTH = "broker, controller"


def nodes(*states: str, roles: str = BOTH, controllers: tuple[str, ...] = ()) -> pd.DataFrame:
    rows = [
        (i, roles, f"127.0.0.1:{21000 + i}", state, i == 1 and roles == BOTH)
        for i, state in enumerate(states, 1)
    ]
    rows += [(100 + i, "controller", "", state, i == 0) for i, state in enumerate(controllers)]
    return pd.DataFrame(rows, columns=["node", "roles", "address", "state", "active_controller"])


def topics(*rows: tuple[Any, ...]) -> pd.DataFrame:
    table = pd.DataFrame(
        [(*row, 0, 120) for row in rows],
        columns=["topic", "partition", "leader", "replicas", "isr", "start", "end"],
    )
    return table.astype({"leader": "Int64", "start": "Int64", "end": "Int64"})


def spread(
    topic: str, partitions: int, brokers: int, copies: int, out: tuple[int, ...] = ()
) -> list[tuple[Any, ...]]:
    rows = []
    for p in range(partitions):
        replicas = [(p + i) % brokers + 1 for i in range(copies)]
        isr = [broker for broker in replicas if broker not in out]
        rows.append((topic, p, isr[0] if isr else None, replicas, isr))
    return rows


ORDERS = topics(*spread("orders", 6, 3, 3), *spread("payments", 3, 3, 2))
BROKEN = topics(*spread("orders", 6, 3, 3, out=(2,)), ("audit", 0, None, [2], [2]))


def replicas(svg: str) -> dict[str, set[str]]:
    """Return each drawn replica's first tooltip line, with the classes that draw it."""
    drawn: dict[str, set[str]] = {}
    for group in ET.fromstring(svg).iter(f"{SVG}g"):
        css = set(group.get("class", "").split())
        if "lk-r" in css:
            line = (group.findtext(f"{SVG}title") or "").splitlines()[0]
            assert line not in drawn
            drawn[line] = css
    return drawn


def words(svg: str) -> list[str]:
    return [text.text or "" for text in ET.fromstring(svg).iter(f"{SVG}text")]


def test_every_replica_is_drawn_once_and_says_what_it_is() -> None:
    drawn = replicas(cluster_map(nodes(*["running"] * 3), BROKEN))
    expected = {
        f"{row['topic']} {row['partition']} on broker {broker}: "
        f"{'leader' if row['leader'] is not pd.NA and row['leader'] == broker else 'follower'}, "
        f"{'in' if broker in row['isr'] else 'out of'} sync"
        for row in BROKEN.to_dict("records")
        for broker in row["replicas"]
    }
    assert set(drawn) == expected
    for line, css in drawn.items():
        assert ("lk-lead" in css) == (": leader" in line)
        assert ("lk-out" in css) == ("out of sync" in line)


def test_a_partition_has_the_same_place_in_every_card() -> None:
    root = ET.fromstring(cluster_map(nodes(*["running"] * 3), ORDERS))
    places: dict[str, set[tuple[str | None, ...]]] = {}
    for block in root.iter(f"{SVG}g"):
        for group in block.findall(f"{SVG}g"):
            rect, tip = group.find(f"{SVG}rect"), group.findtext(f"{SVG}title") or ""
            if rect is not None and " on broker" in tip:
                place = (block.get("transform"), rect.get("x"), rect.get("y"))
                places.setdefault(tip.split(" on ")[0], set()).add(place)
    assert len(places) == 9
    assert all(len(place) == 1 for place in places.values())


@pytest.mark.parametrize("state", ["running", "frozen", "dead", "starting", "unknown"])
def test_a_state_is_told_in_words_and_by_a_shape_of_its_own(state: str) -> None:
    others = [s for s in ("running", "dead") if s != state]
    svg = cluster_map(nodes(state, *others), ORDERS)
    assert state in words(svg)
    signs = {
        path.get("d")
        for path in ET.fromstring(svg).iter(f"{SVG}path")
        if path.get("class") == "lk-sign"
    }
    assert len(signs) >= len({state, *others})
    said = cluster_summary(nodes(state, "running"), topics())
    assert (f"broker 1 {state}" if state != "running" else "all running") in said


def test_the_active_controller_is_told_from_the_others() -> None:
    said = Counter(words(cluster_map(nodes(*["running"] * 3), ORDERS)))
    assert (said["active controller"], said["controller"]) == (1, 2)
    apart = nodes("running", "running", roles="broker", controllers=("running", "dead"))
    said = Counter(words(cluster_map(apart, ORDERS)))
    assert said["controller 100"] == said["running, active"] == said["dead"] == 1
    assert "Active controller: controller 100." in cluster_summary(apart, ORDERS)


def test_a_partition_without_leader_is_called_out() -> None:
    table = nodes("running", "dead", "running")
    assert "No leader: audit 0." in words(cluster_map(table, BROKEN))
    assert "No leader: audit 0." in cluster_summary(table, BROKEN)
    assert "No leader" not in cluster_map(table, ORDERS)


def test_many_partitions_are_counted_and_not_drawn() -> None:
    most = MOST_CELLS // 3
    few, many = spread("clicks", most, 3, 3), spread("clicks", most + 1, 3, 3)
    assert len(replicas(cluster_map(nodes(*["running"] * 3), topics(*few)))) == MOST_CELLS
    svg = cluster_map(nodes(*["running"] * 3), topics(*many))
    assert not replicas(svg)
    led = [int(n) for said in words(svg) for n in re.findall(r"leads (\d+)", said)]
    assert sum(led) == 2 * (most + 1)  # once at the topic, once in the card's last line


def test_kafkas_own_topics_do_not_crowd_out_the_learners() -> None:
    table = topics(*spread("__consumer_offsets", 50, 3, 3), *spread("orders", 6, 3, 3))
    svg = cluster_map(nodes(*["running"] * 3), table)
    assert len(replicas(svg)) == 18
    assert words(svg).index("orders") < words(svg).index("__consumer_offsets")


def test_more_topics_than_fit_are_summed_up() -> None:
    table = topics(*(row for i in range(40) for row in spread(f"t{i:02}", 1, 3, 1)))
    svg = cluster_map(nodes(*["running"] * 3), table)
    assert words(svg).count("31 more topics") == 3
    assert "40 topics, 40 partitions, 40 replicas" in cluster_summary(nodes("running"), table)


def test_a_broker_known_only_from_replica_lists_is_shown() -> None:
    svg = cluster_map(nodes("running", "running"), ORDERS)
    assert "broker 3" in words(svg)
    assert len(replicas(svg)) == 24


def test_the_summary_has_the_tables_numbers() -> None:
    said = cluster_summary(nodes("running", "dead", "frozen"), BROKEN, "lab")
    assert said.splitlines() == [
        "lab: 3 brokers: 1 running; broker 2 dead; broker 3 frozen. Active controller: broker 1.",
        "2 topics, 7 partitions, 19 replicas, 6 out of sync.",
        "Broker 1 leads 2, follows 4; broker 2 leads 0, follows 7; broker 3 leads 4, follows 2.",
        "No leader: audit 0.",
        "Nobody can write or read there until a replica in the ISR is back.",
    ]


def test_a_fresh_cluster_says_what_comes_next() -> None:
    for nothing in (topics(), pd.DataFrame()):
        assert cluster_summary(nodes("running"), nothing).splitlines() == [
            "1 broker, running. Active controller: broker 1.",
            "No topics yet: create one, and its partitions appear here.",
        ]
        assert "no partitions yet" in words(cluster_map(nodes("running"), nothing))


def test_names_are_escaped_and_long_ones_keep_their_ends() -> None:
    name = "a.very-long_topic.name" * 5 + ".v2"
    svg = cluster_map(nodes("running"), topics(*spread(name, 80, 1, 1)), 'a <b> & "c"')
    root = ET.fromstring(svg)
    assert root.findtext(f"{SVG}title") == 'a <b> & "c"'
    assert name in [title.text for title in root.iter(f"{SVG}title")]
    short = next(said for said in words(svg) if "…" in said)
    assert len(short) < len(name) and short.endswith(".v2")


def test_a_screen_reader_gets_the_summary() -> None:
    root = ET.fromstring(cluster_map(nodes(*["running"] * 3), ORDERS, "lab"))
    said = cluster_summary(nodes(*["running"] * 3), ORDERS, "lab")
    assert root.get("role") == "img"
    assert root.findtext(f"{SVG}desc") == said
    assert root.get("aria-label") == " ".join(said.splitlines()[:2])


def test_the_figure_stands_alone() -> None:
    svg = cluster_map(nodes("running", "dead", "frozen"), BROKEN)
    assert svg.count("http") == 1  # the namespace
    assert not re.search(r"<script|<image|<use|url\(|@import| id=| on\w+=", svg)
    classes = {
        name for element in ET.fromstring(svg).iter() for name in element.get("class", "").split()
    }
    assert all(name.startswith("lk-") for name in classes)
    style = ET.fromstring(svg).findtext(f"{SVG}style") or ""
    rules = re.sub(r"\{.*?\}", "\n", style, flags=re.DOTALL).split("\n")
    assert all(rule.startswith(".lk-") for rule in rules if rule.strip())


def test_the_same_tables_give_the_same_text_in_any_row_order() -> None:
    table = nodes("running", "dead", "frozen", controllers=("running",))
    again = cluster_map(table[::-1], BROKEN[::-1], "lab")
    assert cluster_map(table, BROKEN, "lab") == again


@pytest.mark.parametrize(("partitions", "kilobytes"), [(6, 12), (18, 30), (500, 30)])
def test_the_text_stays_small(partitions: int, kilobytes: int) -> None:
    brokers = 3 if partitions == 6 else 9
    states = ["dead", "frozen", *["running"] * (brokers - 2)]
    table = nodes(*states, controllers=("running",) * (brokers // 9 * 5))
    rows = [
        row
        for topic in ("orders", "payments", "shipments", "clicks")[: 1 + partitions // 100]
        for row in spread(topic, partitions, brokers, 3, out=(1, 2))
    ]
    assert len(cluster_map(table, topics(*rows)).encode()) < kilobytes * 1000
