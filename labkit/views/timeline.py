"""The ownership timeline and the offsets of a group: tables to figures, and what they say."""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape, quoteattr

import pandas as pd

from labkit.views.style import HUES, STYLE, shorten, text

WIDTH, PAD, LABEL = 528, 14, 92  # as wide as the cluster map
LANE, BAR, HEAD, AXIS = 24, 18, 62, 20
ROOM = WIDTH - 2 * PAD - LABEL
LETTER = 6.3  # px: the width of a letter in a bar
MOST_LANES = 60  # in a picture that is stored; a live one scrolls

# What a reader calls each mark, and its sign above the lanes.
MARKS = {
    "joined": "+",
    "gone": "−",
    "left": "−",
    "stopped": "−",
    "killed": "✕",
    "died": "✕",
    "failed": "✕",
    "frozen": "‖",
    "thawed": "▶",
    "generation": "│",
    "epoch": "│",
}
LOOK = """
.lk-owned{stroke:none}.lk-silent{fill-opacity:.28;stroke-width:1.2;stroke-dasharray:4 2}
.lk-unowned,.lk-guess{fill:none;stroke:#d55e00;stroke-width:1.4;stroke-dasharray:3 2}
.lk-unknown{fill:var(--jp-ui-font-color1,#1f2933);fill-opacity:.06;stroke-dasharray:1 3;
stroke:var(--jp-ui-font-color3,#a7b0ba)}
.lk-map .lk-in{fill:#fff;font-size:11px;font-weight:600}.lk-map .lk-over{font-size:10.5px}
.lk-at{stroke:var(--jp-ui-font-color3,#a7b0ba);stroke-dasharray:2 3}
.lk-fault{stroke:#d55e00}.lk-committed{fill:#0072b2}.lk-position{fill:#56b4e9;fill-opacity:.55}
"""


def hue(member: str, members: list[str]) -> str:
    """Return a member's colour: the same in every picture of its group."""
    return HUES[members.index(member) % len(HUES)]


def people(owners: pd.DataFrame) -> list[str]:
    """Return the members that a table of ownership names, in the order of their joining."""
    return list(dict.fromkeys(owners.sort_values("since").member.dropna()))


def timeline_summary(owners: pd.DataFrame, marks: pd.DataFrame, group: str) -> str:
    """Say what the timeline shows: who owns what now, and what rebalances cost."""
    now = owners[owners.until.isna()]
    parts = []
    for member, rows in now[now.state != "unowned"].groupby("member"):
        places = ", ".join(str(p) for p in sorted(rows.partition))
        silent = " but is silent" if (rows.state == "silent").any() else ""
        parts.append(f"{member} owns {places}{silent}")
    nobody = sorted(now[now.state == "unowned"].partition)
    if nobody:
        parts.append(f"nobody owns {', '.join(map(str, nobody))}")
    gaps = owners[owners.state.isin(["silent", "unowned"]) & owners.until.notna()]
    cost = (gaps.until - gaps.since).dt.total_seconds().sum()
    lines = [f"Group {group}: {'; '.join(parts) or 'no partition is owned'}."]
    if len(gaps):
        lines.append(f"So far its partitions went unserved for {cost:.1f} s, all taken together.")
    faults = marks[marks.kind.isin(["killed", "died", "failed", "frozen"])]
    if len(faults):
        told = [f"{row.about} {row.kind}" for row in _rows(faults.tail(5))]
        lines.append(f"Faults: {', '.join(told)}.")
    return " ".join(lines)


def timeline(
    owners: pd.DataFrame,
    marks: pd.DataFrame,
    group: str,
    now: pd.Timestamp | None = None,
    seconds: float | None = None,
    guess: dict[tuple[str, int], str] | None = None,
) -> str:
    """Draw one lane per partition, with a bar for each owner's time (notebook 06)."""
    now = now or max([*owners.since.dropna(), *owners.until.dropna(), *marks["at"]], default=None)
    if now is None or owners.empty:
        return _svg([text(PAD, 30, f"Group {group} owns nothing yet.", "lk-say")], 44, group, "")
    first = owners.since.min()
    begin = max(first, now - pd.Timedelta(seconds=seconds)) if seconds else first
    span = max((now - begin).total_seconds(), 1.0)

    def x(at: pd.Timestamp) -> float:
        return float(PAD + LABEL + ROOM * min(max((at - begin).total_seconds() / span, 0), 1))

    members, lanes = people(owners), sorted(set(zip(owners.topic, owners.partition)))
    parts = [text(PAD, 22, "Who owns which partition", "lk-name")]
    parts.append(
        text(PAD, 39, "A bar is an owner's time; a dashed gap is time without one.", "lk-say")
    )
    for number, (topic, partition) in enumerate(lanes[:MOST_LANES]):
        y = HEAD + number * LANE
        label = shorten(f"{topic}-{partition}", 14)
        parts.append(text(PAD + LABEL - 8, y + 13, label, "lk-end lk-soft"))
        rows = owners[(owners.topic == topic) & (owners.partition == partition)]
        for row in _rows(rows):
            left, right = x(row.since), x(row.until if pd.notna(row.until) else now)
            if right > PAD + LABEL or pd.isna(row.until):
                parts.append(_bar(row, left, max(right - left, 1.0), y, members))
        if guess and (topic, partition) in guess:
            words = f"your guess: {guess[topic, partition]}"
            parts.append(text(PAD + LABEL + ROOM, y + 13, words, "lk-end lk-over"))
    bottom = HEAD + min(len(lanes), MOST_LANES) * LANE
    parts += _marks(marks[marks["at"] >= begin], x, bottom)
    parts.append(text(PAD + LABEL, bottom + 15, f"{span:.0f} s ago", "lk-soft"))
    parts.append(text(PAD + LABEL + ROOM, bottom + 15, "now", "lk-soft lk-end"))
    if len(lanes) > MOST_LANES:
        more = f"and {len(lanes) - MOST_LANES} more partitions"
        parts.append(text(PAD, bottom + 15, more, "lk-soft"))
    return _svg(parts, bottom + AXIS + 8, group, timeline_summary(owners, marks, group))


def _bar(row: Any, left: float, width: float, y: float, members: list[str]) -> str:
    seconds = (row.until - row.since).total_seconds() if pd.notna(row.until) else None
    colour, words, css = "", "", "lk-over"
    if row.state in ("owned", "silent"):
        colour = f' fill="{hue(row.member, members)}" stroke="{hue(row.member, members)}"'
        words = row.member if row.state == "owned" else f"{row.member}, silent"
        css = "lk-in" if row.state == "owned" else "lk-over"
    elif seconds is not None:
        words = f"{seconds:.1f} s"
    told = f"{row.topic}-{row.partition}: {row.state} {row.member or ''}"
    shape = (
        f'<rect class="lk-{row.state}" x="{left:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" '
        f'rx="3"{colour}><title>{escape(told)}</title></rect>'
    )
    room = int((width - 6) / LETTER)
    return shape + (
        text(left + 4, y + 13, shorten(words, room), css) if room >= 4 and words else ""
    )


def _marks(marks: pd.DataFrame, x: Any, bottom: float) -> list[str]:
    parts, free = [], 0.0
    for row in _rows(marks):
        sign, place = MARKS.get(row.kind), x(row.at)
        if sign is None:
            continue
        fault = " lk-fault" if row.kind in ("killed", "died", "failed", "frozen") else ""
        parts.append(f'<path class="lk-at{fault}" d="M{place:.1f} {HEAD - 4}V{bottom}"/>')
        words = f"{sign}{row.about.rsplit('-', 1)[-1]}"
        if place >= free and row.kind not in ("generation", "epoch"):  # else it would be a blot
            parts.append(text(place, HEAD - 8, words, "lk-over"))
            free = place + 8 * len(words)
    return parts


def offsets_figure(offsets: pd.DataFrame, group: str) -> str:
    """Draw how far a group has read each partition, from the log's start to its end."""
    rows = _rows(offsets.head(MOST_LANES))
    top = max([1, *offsets.end.dropna()])
    parts = [text(PAD, 22, "How far it has read", "lk-name")]
    parts.append(
        text(PAD, 39, "Dark: committed. Light: read, not yet committed. Empty: lag.", "lk-say")
    )
    y = float(HEAD - 12)
    for row in rows:
        name = shorten(f"{row.topic}-{row.partition}", 14)
        parts.append(text(PAD + LABEL - 8, y + 13, name, "lk-end lk-soft"))
        numbers = [
            0 if pd.isna(n) else int(n) for n in (row.start, row.committed, row.position, row.end)
        ]
        start, committed, position, end = (n / top * (ROOM - 90) for n in numbers)
        left = PAD + LABEL
        parts.append(_rect("lk-track", left + start, y, end - start))
        parts.append(_rect("lk-position", left + start, y, max(position, committed) - start))
        parts.append(_rect("lk-committed", left + start, y, committed - start))
        lag = "no commit yet" if pd.isna(row.lag) else f"lag {row.lag} of {row.end}"
        parts.append(text(WIDTH - PAD, y + 13, lag, "lk-end lk-over"))
        y += LANE
    return _svg(parts, y + 8, group, offsets_summary(offsets, group))


def offsets_summary(offsets: pd.DataFrame, group: str) -> str:
    """Say how far behind a group is."""
    if offsets.empty:
        return f"Group {group} has committed nothing yet."
    worst = offsets.sort_values("lag", na_position="first").iloc[-1]
    total = int(offsets.lag.fillna(0).sum())
    most = f", most on {worst.topic}-{worst.partition} ({worst.lag})" if total else ""
    return f"Group {group} is {total} records behind{most}."


def log_figure(records: pd.DataFrame, groups: pd.DataFrame, title: str) -> str:
    """Draw a partition as a row of cells with offset and key, and groups' positions below it.

    ``records`` has offset and key, ``groups`` group and committed: the next offset it will read.
    """
    cell, parts = 44, [text(PAD, 22, title, "lk-name")]
    shown = records.tail((WIDTH - 2 * PAD) // cell)
    first = int(shown.offset.iloc[0]) if len(shown) else 0
    for number, row in enumerate(_rows(shown)):
        left = PAD + number * cell
        parts.append(
            f'<rect class="lk-card" x="{left}" y="34" width="{cell - 3}" height="36" rx="3"/>'
        )
        parts.append(text(left + 5, 48, str(row.offset), "lk-code lk-soft"))
        parts.append(text(left + 5, 63, shorten(str(row.key), 6), "lk-code"))
    y = 84.0
    for row in _rows(groups.sort_values("committed")):
        place = PAD + min(max(int(row.committed) - first, 0), len(shown)) * cell
        parts.append(text(place, y, f"▲ {row.group} reads {row.committed} next", "lk-over"))
        y += 16
    summary = "; ".join(f"{r.group} reads offset {r.committed} next" for r in _rows(groups))
    return _svg(parts, y + 6, title, summary)


def _rows(table: pd.DataFrame) -> list[Any]:
    return list(table.itertuples())


def _rect(css: str, x: float, y: float, width: float) -> str:
    size = f'width="{max(width, 0):.1f}" height="{BAR}" rx="2"'
    return f'<rect class="{css}" x="{x:.1f}" y="{y:.1f}" {size}/>'


def _svg(parts: list[str], height: float, title: str, summary: str) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="lk-map" viewBox="0 0 {WIDTH} {height:g}" '
        f'width="620" role="img" aria-label={quoteattr(summary or title)}>'
        f"<style>{STYLE}{LOOK}</style>"
        f'<rect class="lk-panel" x=".5" y=".5" width="{WIDTH - 1}" height="{height - 1:g}" rx="8"/>'
        f"{''.join(parts)}</svg>"
    )
