"""Run a notebook cell as a program of its own: %%spawn name."""

from __future__ import annotations

import contextlib
import keyword
import sys
import threading
import time

from labkit import cluster as clusters
from labkit.cluster.embedded import EmbeddedCluster
from labkit.errors import LabError
from labkit.groups.process import Process, free, wait_until
from labkit.progress import _in_notebook

SHOWN = 200  # lines under the cell; .output has more
REDRAW = 0.2  # seconds between two looks at what was printed

# The program's own frames only: those above are how it was started.
RUNNER = """
import runpy, sys, traceback
path, bootstrap = sys.argv[1:]
def show(kind, error, trace):
    own = trace
    while own and own.tb_frame.f_code.co_filename != path:
        own = own.tb_next
    traceback.print_exception(kind, error, own or trace)
sys.excepthook = show
sys.argv[:] = [path]
runpy.run_path(path, {"BOOTSTRAP": bootstrap}, "__main__")
"""


class Program(Process):
    """A cell that runs in a process of its own: kill it, freeze it, read its output."""

    def __init__(self, cluster: EmbeddedCluster, name: str, cell: str) -> None:
        super().__init__(cluster._lease, f"program-{name}", name)
        free(self._lease, [self._id], f"the program {name!r}")
        file = self._lease.folder / f"{name}.py"
        file.write_text(_numbered(cell))
        argv = [sys.executable, "-P", "-u", "-c", RUNNER, str(file), cluster.bootstrap]
        self._spawn(argv, self._lease.folder)

    def wait(self, timeout: float = 30) -> int:
        """Wait until the program has ended, and return its exit code."""
        wait_until(
            lambda: f"{self.name!r} is {self.state}" if self.alive else "",
            timeout,
            f"give more time with timeout=, or end it: {self.name}.kill()",
        )
        return int(self.exit_code or 0)

    def __repr__(self) -> str:
        state = self.state
        if state == "dead":
            return f"program {self.name!r}: ended with exit code {self.exit_code}"
        return f"program {self.name!r}: {state} as pid {self.pid}"

    def _show(self) -> None:
        """Show what is printed under the cell, as it comes, until the program has ended."""
        if not _in_notebook():
            return  # a terminal cannot be written to without disturbing what is typed
        from IPython.display import display

        handle, shown = display({"text/plain": ""}, raw=True, display_id=True), ""

        def follow() -> None:
            nonlocal shown
            alive = True
            while alive:
                alive = self.alive  # before the last look, so that no last words are missed
                text = "\n".join(self.output.splitlines()[-SHOWN:])
                if text != shown:
                    shown = text
                    handle.update({"text/plain": text}, raw=True)
                time.sleep(REDRAW)

        threading.Thread(target=follow, daemon=True).start()


def _numbered(cell: str) -> str:
    # In the notebook, the magic is line 1: so it is here, and tracebacks count as the learner does.
    return f"# %%spawn\n{cell}"


def spawn(line: str, cell: str) -> None:
    """Run the cell as a program called ``line``, known by that name in the notebook."""
    shell, name = sys.modules["IPython"].get_ipython(), line.strip()
    if not name.isidentifier() or keyword.iskeyword(name):
        raise LabError(f"{name!r} cannot be the name of a program", "write %%spawn shipper")
    if not cell.strip():
        raise LabError(f"the program {name!r} is empty", "write it below %%spawn, in the same cell")
    old = shell.user_ns.get(name)
    if old is not None and not isinstance(old, Program):
        raise LabError(
            f"{name!r} already names a {type(old).__name__} here", "give the program another name"
        )
    try:
        compile(_numbered(cell), name, "exec")
    except SyntaxError as error:
        raise LabError(
            f"line {error.lineno} of the program {name!r} is not Python: {error.msg}",
            f"correct it: {(error.text or '').strip()}",
        ) from None
    open_ones = [cluster for cluster in clusters._held.values() if not cluster._closed]
    if not open_ones:
        raise LabError("no cluster is open that a program could use", "labkit.start() one first")
    if old is not None:
        with contextlib.suppress(LabError):  # it has ended by itself
            old.kill()
    shell.user_ns[name] = program = Program(open_ones[-1], name, cell)
    program._show()


def register() -> None:
    """Make %%spawn known, if this is IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is not None:
        shell.register_magic_function(spawn, "cell", "spawn")
