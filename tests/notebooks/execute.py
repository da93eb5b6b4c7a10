"""make notebooks: execute every source notebook and store its outputs."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from labkit import LabError, course

CELL_WITHIN = 120  # seconds


def main() -> int:
    """Execute them in order; return 1 if one stopped at an error, and leave that one as it was."""
    failed = []
    for lesson in course.lessons():
        print(lesson.path.name, flush=True)
        with tempfile.TemporaryDirectory(prefix="labkit-notebooks-") as folder:
            try:
                notebook = execute(lesson.path, Path(folder), loud=True)
                nbformat.write(notebook, lesson.path)
            except CellExecutionError as error:
                print(error, file=sys.stderr)
                failed.append(lesson.path.name)
    print(f"failed: {', '.join(failed)}" if failed else "all outputs are stored")
    return 1 if failed else 0


def execute(path: Path, workspace: Path, loud: bool = False) -> NotebookNode:
    """Run a notebook in a kernel with a workspace of its own, and return it with its outputs."""
    notebook = nbformat.read(path, as_version=4)
    count, begin = len(notebook.cells), time.monotonic()

    def report(cell: NotebookNode, cell_index: int) -> None:
        if loud and cell.cell_type == "code":
            seconds = time.monotonic() - begin
            print(f"  {seconds:5.1f} s  cell {cell_index + 1} of {count}: {cell.id}", flush=True)

    client = NotebookClient(
        notebook,
        timeout=CELL_WITHIN,
        kernel_name="python3",
        resources={"metadata": {"path": str(path.parent)}},
        store_widget_state=False,
        record_timing=False,
        on_cell_execute=report,
    )
    client.execute(env=os.environ | {"LABKIT_WORKSPACE": str(workspace)})
    notebook.metadata.language_info = {"name": "python"}  # its version is the machine's, not ours
    return notebook


if __name__ == "__main__":
    try:
        sys.exit(main())
    except LabError as error:
        sys.exit(str(error))
