"""How figures look: colours for light and dark, and a shape for each state."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

HUES = ("#0072b2", "#00795a", "#9c4f86", "#56698f")  # legible under white, on white and on black

STYLE = """
.lk-map{max-width:100%;height:auto;
font-family:-apple-system,"Segoe UI",Roboto,"Liberation Sans",Arial,sans-serif}
.lk-map text{fill:var(--jp-ui-font-color1,#1f2933);fill-opacity:1;stroke:none;font-size:11.5px}
.lk-map .lk-say{font-size:13px}.lk-map .lk-name{font-size:13.5px;font-weight:650}
.lk-map .lk-soft{fill:var(--jp-ui-font-color2,#5b6672)}.lk-map .lk-end{text-anchor:end}
.lk-map .lk-code{font:11px ui-monospace,Menlo,Consolas,"Liberation Mono",monospace}
.lk-panel{fill:var(--jp-layout-color1,#fff);stroke:var(--jp-border-color2,#d5dbe1)}
.lk-card,.lk-track{fill:var(--jp-ui-font-color1,#1f2933);fill-opacity:.03}
.lk-card{stroke:var(--jp-border-color1,#b8c1cb)}.lk-track{fill-opacity:.08}
.lk-frozen>.lk-card{fill:#56b4e9;fill-opacity:.13;stroke:#3a9bd4;stroke-width:2}
.lk-dead>.lk-card{fill:none;stroke:#d55e00;stroke-width:1.5;stroke-dasharray:6 4}
.lk-unknown>.lk-card,.lk-starting>.lk-card{stroke-dasharray:2 3}
.lk-dead .lk-body{opacity:.6}.lk-cross{stroke:#d55e00;stroke-width:1.5;opacity:.3}
.lk-rule{stroke:var(--jp-border-color2,#d5dbe1)}.lk-ink{color:var(--jp-ui-font-color1,#1f2933)}
.lk-sign{stroke-width:1.5;stroke-linecap:round;stroke-linejoin:round}
.lk-r{fill:currentColor;fill-opacity:.15;stroke:currentColor;stroke-width:1.2;
stroke:color-mix(in srgb,currentColor 75%,var(--jp-ui-font-color1,#1f2933))}
.lk-lead{fill-opacity:1}.lk-out{fill:none;stroke-dasharray:3.5 2.5}
.lk-map .lk-r text{text-anchor:middle;font-size:12.5px}
.lk-map .lk-lead text{fill:#fff;font-weight:700}
.lk-none,.lk-mark,.lk-bang{stroke:var(--jp-ui-font-color3,#a7b0ba);stroke-width:3;
stroke-linecap:round;stroke-dasharray:none}
.lk-mark{stroke:#d55e00;stroke-width:10}.lk-bang{stroke:#fff;stroke-width:1.5}
.lk-alarm{fill:#d55e00;fill-opacity:.1;stroke:#d55e00}
"""

CROWN = "M-6 4.5V-3L-3 0 0-5 3 0 6-3V4.5Z"
SIGNS = {  # stroke, fill, shape: one shape per state, so that no reader depends on its colour
    "running": ("#009e73", "#009e73", "M-3.8 0a3.8 3.8 0 1 0 7.6 0a3.8 3.8 0 1 0-7.6 0"),
    "frozen": ("#3a9bd4", "none", "M0-6V6M-5.2-3 5.2 3M-5.2 3 5.2-3M-2-5 0-3.5 2-5M-2 5 0 3.5 2 5"),
    "dead": ("#d55e00", "none", "M-4-4 4 4M-4 4 4-4"),
    "starting": ("#c98500", "none", "M0-4.5A4.5 4.5 0 1 1-4.5 0"),
    "unknown": ("#8a939d", "none", "M-2.2-2.2Q-2-5 0-5 2.5-5 2.4-2.8 2.4-1.2 0 0V1.6M0 4.6V4.6"),
    "alarm": ("#d55e00", "none", "M0-6 7 6H-7ZM0-2V2M0 4V4"),
    "controller": ("currentColor", "none", CROWN),
    "active controller": ("currentColor", "currentColor", CROWN),
}


def text(x: float, y: float, words: str, css: str = "") -> str:
    css = f' class="{css}"' if css else ""
    return f'<text x="{x:.4g}" y="{y:.5g}"{css}>{escape(words)}</text>'


def shorten(name: str, room: int) -> str:
    # The end of a name often tells versions and regions apart, so the middle goes.
    return name if len(name) <= room else f"{name[: room - room // 3 - 1]}…{name[-(room // 3) :]}"


def sign(name: str, x: float, y: float) -> str:
    stroke, fill, shape = SIGNS.get(name, SIGNS["unknown"])
    return (
        f'<path class="lk-sign" stroke="{stroke}" fill="{fill}" '
        f'transform="translate({x:g} {y:g})" d="{shape}"/>'
    )


def marks(spots: Sequence[tuple[float, float]]) -> str:
    discs = "".join(f"M{x:.4g} {y:g}h0" for x, y in spots)
    bangs = "".join(f"M{x:.4g} {y - 2.5:g}v2.6m0 2.4v0" for x, y in spots)
    return f'<path class="lk-mark" d="{discs}"/><path class="lk-bang" d="{bangs}"/>' * bool(spots)
