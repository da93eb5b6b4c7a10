"""Tell the one who waits what is being waited for, in a terminal or under a notebook cell."""

from __future__ import annotations

import sys
import threading
import time
from types import TracebackType
from typing import Any

SHOW_AFTER = 1.5  # seconds: what is quicker needs no explanation


class Progress:
    """Show a line that changes while a block runs, once the block has run for a second."""

    def __init__(self, task: str) -> None:
        self.task = task
        self._step = ""
        self._begin = time.monotonic()
        self._done = threading.Event()
        self._printed = 0
        self._handle: Any = None
        self._notebook = in_notebook()
        self._ticker = threading.Thread(target=self._tick, daemon=True)

    def __enter__(self) -> Progress:
        self._ticker.start()
        return self

    def step(self, text: str) -> None:
        """Say what the block is at now."""
        self._step = text

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._done.set()
        self._ticker.join()
        if self._printed:
            outcome = "failed after" if kind else "done in"
            self._show(f"{self.task}: {outcome} {time.monotonic() - self._begin:.1f} s", last=True)

    def _tick(self) -> None:
        pause = SHOW_AFTER
        while not self._done.wait(pause):
            seconds = int(time.monotonic() - self._begin)
            self._show(f"{self.task}: {self._step or 'working'} ({seconds} s)")
            pause = 0.5 if self._notebook or sys.stderr.isatty() else 5.0

    def _show(self, line: str, last: bool = False) -> None:
        self._printed += 1
        if self._notebook:
            from IPython.display import display

            bundle = {"text/plain": line}
            if self._handle is None:
                self._handle = display(bundle, raw=True, display_id=True)
            else:
                self._handle.update(bundle, raw=True)
        elif sys.stderr.isatty():
            print(f"\r\x1b[K{line[:100]}", end="\n" if last else "", file=sys.stderr, flush=True)
        else:
            print(line, file=sys.stderr, flush=True)


def in_notebook() -> bool:
    """Tell whether this process is the kernel of a notebook."""
    # Only a kernel can update an output in place; asking must not import IPython for the others.
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")
