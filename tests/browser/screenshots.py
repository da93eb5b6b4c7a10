"""make screenshots: the README's picture, taken from the real lab after lesson 00 has run."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.browser.lab import (
    browser,
    errors,
    execute,
    find_browser,
    open_lab,
    run_all,
    scroll_to,
    serve,
    set_theme,
)

PICTURE = Path(__file__).parents[2] / "notebooks" / "images" / "lab.png"
SIZE, SCALE = {"width": 940, "height": 880}, 1.5
MOST_BYTES = 400_000


def main() -> None:
    """Take the picture, and refuse one that shows an error or is too large for a web page."""
    executable = find_browser()
    if executable is None:
        sys.exit("no Chrome or Chromium found\ninstall one, or run `playwright install chromium`")
    with (
        tempfile.TemporaryDirectory(prefix="labkit-screenshots-") as folder,
        serve(Path(folder)) as lab,
        browser(executable) as started,
    ):
        print("running lesson 00 in JupyterLab", flush=True)
        page = started.new_page(viewport=SIZE, device_scale_factor=SCALE)
        open_lab(page, lab)
        set_theme(page, "light")
        execute(page, "application:toggle-left-area")
        run_all(page)
        if found := errors(page):
            sys.exit(f"a cell ended in an error: {found[0]}")
        scroll_to(page, "kill")
        picture = page.screenshot()
    if len(picture) > MOST_BYTES:
        sys.exit(f"the picture has {len(picture)} bytes, more than {MOST_BYTES}")
    PICTURE.write_bytes(picture)
    print(f"{PICTURE.name}: {len(picture) // 1000} KB")


if __name__ == "__main__":
    main()
