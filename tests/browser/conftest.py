"""One lab and one page for all browser tests, if there is a browser."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page

from tests import conftest
from tests.browser.lab import Lab, browser, find_browser, open_lab, serve

WHAT = (
    "browser tests: no Chrome or Chromium found; install one, or run `playwright install chromium`"
)


@pytest.fixture(scope="session")
def executable() -> str:
    """The browser; without one the tests are skipped, and where all must be tested they fail."""
    found = find_browser()
    if found is None:
        conftest.not_tested.append(WHAT)
        (pytest.fail if os.environ.get("LABKIT_REQUIRE_ALL") == "1" else pytest.skip)(WHAT)
    return str(found)


@pytest.fixture(scope="session")
def lab(executable: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The lab as `make lab` starts it."""
    with serve(tmp_path_factory.mktemp("lab")) as lab:
        yield lab


@pytest.fixture(scope="session")
def requests() -> list[str]:
    """The addresses that the page asked for."""
    return []


@pytest.fixture(scope="session")
def page(executable: str, lab: Lab, requests: list[str]) -> Iterator[Page]:
    """The page that the lab's address opens."""
    with browser(executable) as started:
        page = started.new_page(viewport={"width": 1300, "height": 900})
        page.on("request", lambda request: requests.append(request.url))
        page.on("websocket", lambda socket: requests.append(socket.url))
        open_lab(page, lab)
        yield page


@pytest.fixture(scope="session")
def screenshots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where pictures go that a person may want to look at."""
    chosen = os.environ.get("LABKIT_SCREENSHOTS")
    folder = Path(chosen) if chosen else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder
