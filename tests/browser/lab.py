"""The lab as a learner meets it: `labkit lab` as a process, its page in a real browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from playwright.sync_api import Browser, Page, sync_playwright

from labkit import runtime
from labkit.cluster.plan import free_ports
from tests.conftest import processes_of

NAMES = ("chromium", "google-chrome", "google-chrome-stable", "chromium-browser", "chrome")
MAC = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"
QUIET = ("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
UP_WITHIN, RUN_WITHIN = 60, 240  # seconds
NBGRADER = {"@jupyter/nbgrader": True}
SCHEMES = {"light": "JupyterLab Light", "dark": "JupyterLab Dark"}

CELLS = "jupyterapp.shell.currentWidget.content.widgets"
CODE_CELLS = f"{CELLS}.filter(c => c.model.type === 'code')"


class Lab(NamedTuple):
    """A JupyterLab that `labkit lab` has started."""

    url: str
    process: subprocess.Popen[bytes]
    folder: Path

    def processes(self) -> list[psutil.Process]:
        """List the server and its kernels."""
        return processes_of(self.folder)


@contextmanager
def serve(folder: Path) -> Iterator[Lab]:
    """Start the lab with its workspace, home and settings in a folder of their own."""
    # Only so can a script press a menu's buttons by name; the rest is as every learner has it,
    # without the buttons of nbgrader, which comes with the test tools.
    config, page = {"LabApp": {"expose_app_in_browser": True}}, {"disabledExtensions": NBGRADER}
    _write(folder / "config" / "jupyter_lab_config.json", config)
    _write(folder / "config" / "labconfig" / "page_config.json", page)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JUPYTER", "XDG_"))}
    environment |= {
        "HOME": str(folder / "home"),
        "JUPYTER_CONFIG_PATH": str(folder / "config"),
        "LABKIT_HOME": str(runtime.home()),  # the jars are not fetched again
        "LABKIT_WORKSPACE": str(folder / "workspace"),
        "LABKIT_GRACE": "3",
    }
    port, output = free_ports(1)[0], folder / "lab.log"
    command = [Path(sys.executable).with_name("labkit"), "lab", "--no-browser", "--port", str(port)]
    with output.open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    try:
        yield Lab(_address(process, output), process, folder)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(30)
            finally:
                process.kill()


def _write(path: Path, content: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def _address(process: subprocess.Popen[bytes], output: Path) -> str:
    deadline = time.monotonic() + UP_WITHIN
    while process.poll() is None and time.monotonic() < deadline:
        if found := re.search(r"http://127\.0\.0\.1:\S+\?token=\w+", output.read_text()):
            return found[0]
        time.sleep(0.1)
    raise AssertionError(f"labkit lab gave no address; it said:\n{output.read_text()}")


def find_browser() -> str | None:
    """Return an installed Chrome or Chromium, else Playwright's own, else None."""
    for name in (*NAMES, MAC):
        if found := shutil.which(name):
            return found
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
    return own if Path(own).exists() else None


@contextmanager
def browser(executable: str) -> Iterator[Browser]:
    """Start a browser that nobody sees."""
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=executable, args=list(QUIET))
        try:
            yield started
        finally:
            started.close()


def open_lab(page: Page, lab: Lab) -> None:
    """Open the address that the lab printed and wait until its notebook has a kernel."""
    page.goto(lab.url)
    page.wait_for_selector(".jp-Notebook .jp-CodeCell", timeout=UP_WITHIN * 1000)
    idle = "jupyterapp.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'"
    page.wait_for_function(idle, timeout=UP_WITHIN * 1000, polling=200)


def execute(page: Page, command: str, **arguments: Any) -> None:
    """Begin one of JupyterLab's own commands, as its menus do."""
    page.evaluate("([id, args]) => {jupyterapp.commands.execute(id, args)}", [command, arguments])


def run_all(page: Page) -> None:
    """Run every cell of the open notebook and wait until each has its number."""
    execute(page, "notebook:run-all-cells")
    done = f"{CODE_CELLS}.every(c => /^\\d+$/.test(c.prompt))"
    page.wait_for_function(done, timeout=RUN_WITHIN * 1000, polling=200)


def run_cell(page: Page, cell: str) -> None:
    """Run the cell that has this id and wait until it has its number."""
    number = scroll_to(page, cell)
    execute(page, "notebook:run-cell")
    for prompt in (r"\*", r"\d+"):
        seen = f"n => /^{prompt}$/.test({CELLS}[n].prompt)"
        page.wait_for_function(seen, arg=number, timeout=RUN_WITHIN * 1000, polling=20)


def scroll_to(page: Page, cell: str) -> int:
    """Bring the cell that has this id to the top, select it, and return its number."""
    number: int = page.evaluate(
        """async id => {
            const notebook = jupyterapp.shell.currentWidget.content;
            const number = notebook.widgets.findIndex(c => c.model.id === id);
            notebook.activeCellIndex = number;
            await notebook.scrollToItem(number, 'start');
            notebook.widgets[number].node.scrollIntoView({block: 'start'});
            return number;
        }""",
        cell,
    )
    return number


def errors(page: Page) -> list[str]:
    """Return the errors that stand below the cells."""
    outputs = f"{CODE_CELLS}.flatMap(c => c.model.outputs.toJSON())"
    found: list[str] = page.evaluate(
        f"{outputs}.filter(o => o.output_type === 'error').map(o => o.ename + ': ' + o.evalue)"
    )
    return found


def set_theme(page: Page, scheme: str) -> None:
    """Switch JupyterLab to its light or its dark theme."""
    execute(page, "apputils:change-theme", theme=SCHEMES[scheme])
    wanted = "true" if scheme == "light" else "false"
    page.wait_for_selector(f"body[data-jp-theme-light='{wanted}']", state="attached")
    page.wait_for_selector("#jupyterlab-splash", state="detached")
