"""The lab in a real browser, as `make lab` opens it: one visit, from its start to its end."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import urlopen

import psutil
import pytest
from playwright.sync_api import Page

from labkit.cluster import lease
from tests.browser.lab import Lab, errors, open_lab, run_all, run_cell, scroll_to, set_theme
from tests.conftest import processes_of

START, KILL = "start", "kill"  # ids of cells in lesson 00
MAP = ".jp-Cell.jp-mod-active .jp-OutputArea svg.lk-map"


def brokers(lab: Lab) -> list[psutil.Process]:
    """List the processes of the lab's cluster: brokers and their guard."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LABKIT_WORKSPACE", str(lab.folder / "workspace"))
        return processes_of(lease.lab_folder("lab"))


def wait_until_gone(find, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while found := find():
        assert time.monotonic() < deadline, found
        time.sleep(0.1)


def test_without_the_token_nobody_gets_in(lab: Lab) -> None:
    address = urlsplit(lab.url)
    contents = f"http://{address.netloc}/api/contents"
    with urlopen(f"{contents}?{address.query}") as answer:
        assert answer.status == 200
    for query in ("", "?token=guessed"):
        with pytest.raises(HTTPError, match="403"):
            urlopen(contents + query)


def test_the_lab_opens_on_the_first_lesson_and_asks_nothing(page: Page) -> None:
    assert page.locator(".jp-NotebookPanel h1").inner_text().startswith("Start here")
    assert page.locator(".lm-DockPanel-tabBar .lm-mod-current").inner_text() == (
        "00-start-here.ipynb"
    )
    assert page.locator(".jp-Dialog, .jp-toastContainer .Toastify__toast").count() == 0


def test_every_cell_runs_and_none_ends_in_an_error(page: Page) -> None:
    run_all(page)
    assert errors(page) == []


def test_the_map_shows_three_brokers_and_after_the_kill_a_dead_one(page: Page) -> None:
    for cell, dead in ((START, 0), (KILL, 1)):
        scroll_to(page, cell)
        drawing = page.locator(MAP)
        said = drawing.locator("text").all_text_contents()
        assert {"broker 1", "broker 2", "broker 3"} <= set(said)
        assert said.count("dead") == dead


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1300, 760])
def test_the_map_fits_and_follows_the_theme(
    page: Page, screenshots: Path, scheme: str, width: int
) -> None:
    set_theme(page, scheme)
    page.set_viewport_size({"width": width, "height": 900})
    scroll_to(page, KILL)
    drawing = page.locator(MAP)
    page.screenshot(path=screenshots / f"lab-{scheme}-{width}.png")
    room = drawing.evaluate("svg => svg.closest('.jp-OutputArea').getBoundingClientRect().right")
    box = drawing.bounding_box()
    assert box and box["width"] > 200 and box["x"] + box["width"] <= room + 1
    panel = "svg => getComputedStyle(svg.querySelector('.lk-panel')).fill.match(/\\d+/g)"
    text = "svg => getComputedStyle(svg.querySelector('text')).fill.match(/\\d+/g)"
    lightness = [sum(map(int, drawing.evaluate(what)[:3])) / 765 for what in (panel, text)]
    light, dark = lightness if scheme == "light" else reversed(lightness)
    assert light > 0.8 and dark < 0.2


def test_no_request_leaves_this_machine(page: Page, lab: Lab, requests: list[str]) -> None:
    netloc = urlsplit(lab.url).netloc
    away = {u for u in requests if not u.startswith(("data:", "blob:")) and netloc not in u}
    assert len(requests) > 20 and not away


def test_closing_the_tab_ends_the_kernel_and_then_the_cluster(page: Page, lab: Lab) -> None:
    run_cell(page, START)
    assert len(brokers(lab)) >= 3
    page.keyboard.press("Control+s")
    page.wait_for_selector(".lm-DockPanel-tabBar .lm-mod-current:not(.jp-mod-dirty)")
    page.locator(".lm-DockPanel-tabBar .lm-mod-current .lm-TabBar-tabCloseIcon").click()
    page.wait_for_selector(".jp-NotebookPanel", state="detached")
    assert page.locator(".jp-Dialog").count() == 0
    wait_until_gone(lambda: [p for p in lab.processes() if "ipykernel_launcher" in p.cmdline()])
    wait_until_gone(lambda: brokers(lab))


def test_stopping_the_lab_leaves_nothing_behind(page: Page, lab: Lab) -> None:
    open_lab(page, lab)
    run_cell(page, START)
    assert len(brokers(lab)) >= 3 and lab.processes()
    page.context.close()
    lab.process.send_signal(signal.SIGTERM)
    assert lab.process.wait(30) == 0
    wait_until_gone(lambda: brokers(lab) + lab.processes())
