"""What a learner thinks that the next rebalance will do, beside what it did."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd

from labkit.groups.heard import Partition


class Prediction:
    """A guess of who will own which partition; show it to see what has come of it."""

    def __init__(self, guess: dict[Partition, str], made_at: Any, look: Callable[[], None]) -> None:
        self.guess, self.made_at = guess, made_at
        self.actual: dict[Partition, str] | None = None  # who owned what after the rebalance
        self._look = look

    @property
    def table(self) -> pd.DataFrame:
        """The guess as a table: partition, predicted, actual, right; the last two NA before."""
        self._look()
        rows = []
        for (topic, partition), member in self.guess.items():
            owner = self.actual.get((topic, partition)) if self.actual is not None else None
            right = owner == member if self.actual is not None else None
            rows.append((f"{topic}-{partition}", member, owner, right))
        table = pd.DataFrame(rows, columns=["partition", "predicted", "actual", "right"])
        return table.astype({"actual": "string", "right": "boolean"})

    def __repr__(self) -> str:
        table = self.table
        head = "waiting for the next rebalance\n" if self.actual is None else ""
        return head + self._words(table).to_string(index=False)

    def _repr_html_(self) -> str:
        table = self.table
        head = "<p>waiting for the next rebalance</p>" if self.actual is None else ""
        return head + str(self._words(table).to_html(index=False))

    def _words(self, table: pd.DataFrame) -> pd.DataFrame:
        if self.actual is None:
            return table.drop(columns=["actual", "right"])
        words = table.right.map({True: "yes", False: "no"})
        return table.assign(actual=table.actual.fillna("nobody"), right=words)
