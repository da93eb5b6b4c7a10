"""The cluster map: brokers, what each leads and follows, and who is dead or frozen."""

from __future__ import annotations

import textwrap
from typing import NamedTuple
from xml.sax.saxutils import escape, quoteattr

import pandas as pd

from labkit.views.style import HUES, STYLE, marks, shorten, sign, text

WIDTH, PAD, GAP = 528, 18, 12  # narrow, so that letters are still letters at 400 px
SHOWN_WIDTH = 620  # px: the letters are then as large as the notebook's own
INSET, TILE, TILE_HEIGHT, TILE_GAP = 10, 40, 24, 6
LABEL, BAR, BLOCK_GAP, FOOT, CONTROLLER, LINE = 17, 26, 13, 24, 46, 17
MOST_CELLS = 54  # replicas drawn one by one; more are counted, as Kafka's own topics always are
MOST_BLOCKS, MOST_NAMED = 32, 6  # topics over all cards; partitions in the alarm


class Node(NamedTuple):
    """Hold a row of the nodes table."""

    id: int
    roles: str
    address: str
    state: str
    active: bool

    def __str__(self) -> str:
        return f"{'broker' if 'broker' in self.roles else 'controller'} {self.id}"


class Partition(NamedTuple):
    """Hold a row of the topics table."""

    topic: str
    number: int
    leader: int | None
    replicas: list[int]
    isr: list[int]
    offsets: str


class Block(NamedTuple):
    """Hold a topic's place, the same in every card, so that the eye finds the other replicas."""

    topic: str
    partitions: list[Partition]
    cells: bool
    top: float
    bottom: float


def cluster_summary(nodes: pd.DataFrame, topics: pd.DataFrame, title: str = "") -> str:
    """Say in a few lines what the cluster map shows (notebook 00)."""
    partitions = _partitions(topics)
    everyone = _nodes(nodes, partitions)
    about_nodes, about_topics = _headline(everyone, partitions)
    active = "".join(f" Active controller: {node}." for node in everyone if node.active)
    lines = [f"{title}: {about_nodes}{active}" if title else about_nodes + active, about_topics]
    if partitions:
        loads = [f"{node} {_load_words(node, partitions)}" for node in _brokers(everyone)]
        lines.append("; ".join(loads).capitalize() + ".")
    return "\n".join(lines + _alarm(partitions))


def cluster_map(nodes: pd.DataFrame, topics: pd.DataFrame, title: str = "") -> str:
    """Draw who keeps and who leads each partition, broker by broker, as SVG (notebook 00)."""
    partitions = _partitions(topics)
    everyone = _nodes(nodes, partitions)
    brokers = _brokers(everyone)
    others = [node for node in everyone if node not in brokers]
    columns = 2 if len(brokers) in (2, 4) else max(1, min(len(brokers), 3))
    head = 63 if any("controller" in node.roles for node in brokers) else 46
    most = max(2, MOST_BLOCKS // max(1, len(brokers)))
    blocks = _blocks(partitions, most, _wide(columns), head + BLOCK_GAP)
    high = (blocks[-1].bottom + BLOCK_GAP if blocks else head) + FOOT

    parts, y = [], PAD + 11.0
    if title:
        parts.append(text(PAD, y + 1, shorten(title, 60), "lk-name"))
        y += LINE + 3
    for sentence in _headline(everyone, partitions):
        for line in textwrap.wrap(sentence, 76):
            parts.append(text(PAD, y, line, "lk-say"))
            y += LINE
    for i, node in enumerate(brokers):
        place = _place(i, columns, y, high)
        parts.append(_broker(node, place, _wide(columns), high, head, blocks, partitions))
    y += -(-len(brokers) // columns) * (high + GAP)
    parts += [_controller(node, _place(i, 3, y, CONTROLLER)) for i, node in enumerate(others)]
    y += -(-len(others) // 3) * (CONTROLLER + GAP)
    lines = [line for sentence in _alarm(partitions) for line in textwrap.wrap(sentence, 76)]
    if lines:
        parts.append(
            f'<rect class="lk-alarm" x="{PAD}" y="{y:g}" width="{WIDTH - 2 * PAD}" '
            f'height="{LINE * len(lines) + 11}" rx="7"/>'
        )
        parts.append(sign("alarm", PAD + 17, y + 14))
        parts += [text(PAD + 34, y + 18 + LINE * i, line) for i, line in enumerate(lines)]
        y += LINE * len(lines) + 11 + GAP
    if partitions:
        parts.append(_legend(y + 7))
        y += 24
    return _svg(parts, y - GAP + PAD, title, cluster_summary(nodes, topics, title), blocks)


def _nodes(nodes: pd.DataFrame, partitions: list[Partition]) -> list[Node]:
    known = [
        Node(
            int(row["node"]),
            row["roles"],
            row["address"],
            row["state"],
            bool(row["active_controller"]),
        )
        for row in nodes.to_dict("records")
    ]
    # A broker that only replica lists still name has left the cluster; its replicas are shown.
    gone = {id for p in partitions for id in p.replicas} - {node.id for node in _brokers(known)}
    return sorted(known + [Node(id, "broker", "", "unknown", False) for id in gone])


def _brokers(everyone: list[Node]) -> list[Node]:
    return [node for node in everyone if "broker" in node.roles]


def _partitions(topics: pd.DataFrame) -> list[Partition]:
    rows = [
        Partition(
            row["topic"],
            int(row["partition"]),
            None if pd.isna(row["leader"]) else int(row["leader"]),
            list(row["replicas"]),
            list(row["isr"]),
            "" if pd.isna(row["end"]) else f"\noffsets {row['start']} to {row['end']}",
        )
        for row in topics.to_dict("records")
    ]
    # Kafka's own topics come last: a learner looks for theirs.
    return sorted(rows, key=lambda p: (p.topic.startswith("__"), p.topic, p.number))


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _headline(everyone: list[Node], partitions: list[Partition]) -> tuple[str, str]:
    brokers = len(_brokers(everyone))
    who = _count(brokers, "broker")
    if brokers < len(everyone):
        who += f" and {_count(len(everyone) - brokers, 'controller')}"
    running = sum(node.state == "running" for node in everyone)
    health = ", running" if len(everyone) == 1 else ", all running"
    ill: dict[tuple[str, str], list[str]] = {}
    for node in everyone:
        if node.state != "running":
            ill.setdefault((str(node).split()[0], node.state), []).append(str(node.id))
    if ill:
        words = [
            f"{kind}{'s' * bool(ids[1:])} {', '.join(ids)} {state}"
            for (kind, state), ids in ill.items()
        ]
        health = f": {'; '.join([f'{running} running', *words])}"
    if not partitions:
        return f"{who}{health}.", "No topics yet: create one, and its partitions appear here."
    late = sum(len(set(p.replicas) - set(p.isr)) for p in partitions)
    return f"{who}{health}.", (
        f"{_count(len({p.topic for p in partitions}), 'topic')}, "
        f"{_count(len(partitions), 'partition')}, "
        f"{_count(sum(len(p.replicas) for p in partitions), 'replica')}, "
        f"{f'{late} out of sync' if late else 'all in sync'}."
    )


def _alarm(partitions: list[Partition]) -> list[str]:
    lost = [f"{shorten(p.topic, 40)} {p.number}" for p in partitions if p.leader is None]
    more = f" and {len(lost) - MOST_NAMED} more" if len(lost) > MOST_NAMED else ""
    return (
        [
            f"No leader: {', '.join(lost[:MOST_NAMED])}{more}.",
            "Nobody can write or read there until a replica in the ISR is back.",
        ]
        if lost
        else []
    )


def _load(node: Node, partitions: list[Partition]) -> tuple[int, int, int]:
    """Count the partitions that a broker leads, follows, and keeps out of sync."""
    kept = [p for p in partitions if node.id in p.replicas]
    led = sum(p.leader == node.id for p in kept)
    return led, len(kept) - led, sum(node.id not in p.isr for p in kept)


def _load_words(node: Node, partitions: list[Partition]) -> str:
    led, followed, _ = _load(node, partitions)
    return f"leads {led}, follows {followed}"


def _blocks(partitions: list[Partition], most: int, wide: float, y: float) -> list[Block]:
    topics: dict[str, list[Partition]] = {}
    for p in partitions:
        topics.setdefault(p.topic, []).append(p)
    own = [name for name in topics if not name.startswith("__")]
    drawn = own if sum(len(p.replicas) for name in own for p in topics[name]) <= MOST_CELLS else []
    if len(topics) > most:
        rest = [topics.pop(name) for name in list(topics)[most - 1 :]]
        topics[f"{len(rest)} more topics"] = [p for ps in rest for p in ps]
    blocks = []
    for name, ps in topics.items():
        rows = -(-len(ps) // _per_row(wide))
        tall = LABEL + (rows * (TILE_HEIGHT + TILE_GAP) - TILE_GAP if name in drawn else BAR)
        blocks.append(Block(name, ps, name in drawn, y, y + tall))
        y += tall + BLOCK_GAP
    return blocks


def _wide(columns: int) -> float:
    return (WIDTH - 2 * PAD - (columns - 1) * GAP) / columns


def _per_row(wide: float) -> int:
    return int((wide - 2 * INSET + TILE_GAP) // (TILE + TILE_GAP))


def _place(i: int, columns: int, y: float, high: float) -> str:
    return f"{PAD + i % columns * (_wide(columns) + GAP):g} {y + i // columns * (high + GAP):g}"


def _card(node: Node, place: str, wide: float, high: float, inside: list[str]) -> str:
    tip = ", ".join(word for word in (str(node), node.address, node.state) if word)
    return (
        f'<g class="lk-ink lk-{node.state}" transform="translate({place})">'
        f"<title>{escape(tip)}</title>"
        f'<rect class="lk-card" width="{wide:g}" height="{high:g}" rx="9"/>'
        f"{''.join(inside)}</g>"
    )


def _controller(node: Node, place: str) -> str:
    return _card(
        node,
        place,
        _wide(3),
        CONTROLLER,
        [
            sign("active controller" if node.active else "controller", INSET + 6, 16),
            text(INSET + 19, 20.5, str(node), "lk-name"),
            sign(node.state, INSET + 6, 33.5),
            text(INSET + 19, 37.5, f"{node.state}, active" if node.active else node.state),
        ],
    )


def _broker(
    node: Node,
    place: str,
    wide: float,
    high: float,
    head: float,
    blocks: list[Block],
    partitions: list[Partition],
) -> str:
    right, foot = wide - INSET, high - FOOT
    parts = [
        text(INSET, 21, str(node), "lk-name"),
        text(right - 14, 20.5, node.state, "lk-end"),
        sign(node.state, right - 5, 16.5),
        text(INSET, 37, shorten(node.address, int(wide / 7.2)), "lk-code lk-soft"),
        f'<path class="lk-rule" d="M{INSET} {head:g}H{right:g}M{INSET} {foot:g}H{right:g}"/>',
    ]
    if "controller" in node.roles:
        role = "active controller" if node.active else "controller"
        parts += [sign(role, INSET + 6, 50), text(INSET + 18, 54.5, role)]
    if node.state == "dead":
        parts.append(
            f'<path class="lk-cross" d="M{INSET} {head:g} {right:g} {foot:g}'
            f'M{INSET} {foot:g} {right:g} {head:g}"/>'
        )
    parts.append('<g class="lk-body">')
    parts += [_topic(node, i, block, wide - 2 * INSET) for i, block in enumerate(blocks)]
    words = _load_words(node, partitions) if partitions else "no partitions yet"
    parts.append(text(INSET, high - 8, words, "lk-soft") + "</g>")
    return _card(node, place, wide, high, parts)


def _topic(node: Node, index: int, block: Block, wide: float) -> str:
    name = shorten(block.topic, int(wide / 6.2))
    tip = f"<title>{escape(block.topic)}</title>" if name != block.topic else ""
    inside = _tiles(node, index, block, wide) if block.cells else _bar(node, block, wide)
    return (
        f'<g color="{HUES[index % len(HUES)]}" transform="translate({INSET} {block.top:g})">'
        f'<text y="10">{escape(name)}{tip}</text>{inside}</g>'
    )


def _tiles(node: Node, index: int, block: Block, wide: float) -> str:
    per_row = _per_row(wide + 2 * INSET)
    step = (wide + TILE_GAP) / per_row
    tiles, late, dots = [], [], ""
    for i, p in enumerate(block.partitions):
        x, y = i % per_row * step, LABEL + i // per_row * (TILE_HEIGHT + TILE_GAP)
        if node.id not in p.replicas:
            dots += f"M{x + (step - TILE_GAP) / 2:.4g} {y + TILE_HEIGHT / 2:g}h0"
            continue
        tiles.append(_tile(node, p, f"lk-r lk-{index}-{i}", x, y, step - TILE_GAP))
        if node.id not in p.isr:
            late.append((x + step - TILE_GAP - 2, y + 2))
    nothing = f'<path class="lk-none" d="{dots}"/>' if dots else ""
    return "".join(tiles) + nothing + marks(late)


def _tile(node: Node, p: Partition, css: str, x: float, y: float, wide: float) -> str:
    role, sync = "follower", "in sync"
    if p.leader == node.id:
        role, css = "leader", css + " lk-lead"
    if node.id not in p.isr:
        sync, css = "out of sync", css + " lk-out"
    tip = (
        f"{shorten(p.topic, 40)} {p.number} on {node}: {role}, {sync}\n"
        f"ISR {', '.join(map(str, p.isr)) or 'empty'}{p.offsets}"
    )
    return (
        f'<g class="{css}"><title>{escape(tip)}</title><rect x="{x:.4g}" y="{y:g}" '
        f'width="{wide:.4g}" height="{TILE_HEIGHT}" rx="5"/>'
        f"{text(x + wide / 2, y + 16.5, str(p.number))}</g>"
    )


def _bar(node: Node, block: Block, wide: float) -> str:
    led, followed, late = _load(node, block.partitions)
    parts, x = [f'<path class="lk-track" d="M0 {LABEL}h{wide:g}v10H0z"/>'], 0.0
    for css, number in ((" lk-lead", led), ("", followed - late), (" lk-out", late)):
        if number > 0:
            end = x + number * wide / len(block.partitions)
            parts.append(f'<path class="lk-r{css}" d="M{x:.4g} {LABEL}H{end:.4g}v10H{x:.4g}z"/>')
            x = end
    parts.append(text(0, LABEL + 24, _load_words(node, block.partitions), "lk-soft"))
    if late:
        parts += [text(wide - 12, LABEL + 24, str(late), "lk-end"), marks([(wide - 5, LABEL + 20)])]
    return "".join(parts)


def _legend(y: float) -> str:
    parts = []
    for x, css, words in (
        (18, " lk-lead", "leader"),
        (90, "", "follower, in sync"),
        (216, " lk-out", "out of sync"),
        (316, None, "no replica here"),
    ):
        parts.append(
            f'<path class="lk-none" d="M{x + 12} {y:g}h0"/>'
            if css is None
            else f'<rect class="lk-r{css}" color="{HUES[0]}" x="{x}" y="{y - 6:g}" '
            'width="18" height="12" rx="3"/>'
        )
        parts.append(text(x + 25, y + 4, words, "lk-soft"))
    return "".join(parts) + marks([(233, y - 5)])


def _svg(parts: list[str], high: float, title: str, summary: str, blocks: list[Block]) -> str:
    # Pointing at a replica dims all but the replicas of its partition, without a script.
    alike = [
        f".lk-map:has(.lk-{b}-{i}:hover) .lk-body .lk-r:not(.lk-{b}-{i})"
        for b, block in enumerate(blocks)
        if block.cells
        for i, p in enumerate(block.partitions)
        if len(p.replicas) > 1
    ]
    hover = f"{','.join(alike)}{{opacity:.25}}" if alike else ""
    label = quoteattr(" ".join(summary.splitlines()[:2]))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="lk-map" role="img" '
        f'aria-label={label} viewBox="0 0 {WIDTH} {high:g}" '
        f'width="{SHOWN_WIDTH}" height="{high * SHOWN_WIDTH / WIDTH:.0f}">'
        f"<title>{escape(title or 'Kafka cluster map')}</title><desc>{escape(summary)}</desc>"
        f"<style>{STYLE}{hover}</style>"
        f'<rect class="lk-panel" x=".5" y=".5" width="{WIDTH - 1}" height="{high - 1:g}" '
        f'rx="12"/>{"".join(parts)}</svg>'
    )
