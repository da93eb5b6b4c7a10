"""The one family of errors that labkit raises: what happened, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LabError(Exception):
    """Say what happened in one line and what to do in the next."""

    def __init__(self, what: str, to_do: str) -> None:
        super().__init__(f"{what}\n{to_do}")
        self.what = what
        self.to_do = to_do

    def _render_traceback_(self) -> list[str]:
        # IPython asks for this: a learner reads two lines, not five layers of ours.
        return [f"\x1b[31mLabError\x1b[0m: {self.what}", f"  → {self.to_do}"]


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the known word most like this one, or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""
