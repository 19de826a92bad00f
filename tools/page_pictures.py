"""Takes the pictures of the page: results/page.png, a conversation, and results/operators.png, the last hour after it.

    .venv/bin/python -m tools.page_pictures

It serves the model with SSD, waits until all is compiled, and holds a conversation of three turns by the page itself,
one of them with a document; nothing is made up. Chromium is that of CHROMIUM, of the path, or of `playwright install
chromium`.

Not here: what the page must do (`tests/server/test_page.py`).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

from benchmarks.servers import started

_RESULTS = Path(__file__).resolve().parent.parent / "results"
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_ARGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync"]
_WAIT_MS = 120_000
_READ_MS = 15_000  # Between two turns, as somebody reads.
_BEGUN = re.compile(r"^(6\d|7\d) s ago|min ago")  # Where charts begin: a minute of samples.
_DOCUMENT = (
    "The old harbour of Norhaven was opened in 1848. It has two piers, a lighthouse of red brick and a fish market "
    "that is held every morning but Sunday. The tide there rises by four metres, so that small boats lie dry twice a "
    "day. The railway came in 1871, and with it the first guests who stayed for the summer."
)
_TURNS = (
    ("Write a Python function that returns how many years ago a year was.", ()),
    ("When was the old harbour of Norhaven opened, and of what is its lighthouse?", (_DOCUMENT,)),
    ("Name three things that a visitor should see in Norhaven, as a list.", ()),
)
"""What is said, and the documents in front of it."""


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--width", type=int, default=1360, help="of both pictures, pixels")
    parser.add_argument("--height", type=int, default=860, help="likewise")
    parser.add_argument("--out", type=Path, default=_RESULTS, help="directory that they are written to")
    args = parser.parse_args()
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
    with tempfile.TemporaryDirectory(prefix="page_pictures_") as folder, sync_playwright() as playwright:
        sizes = ["--dram_gib=1", f"--ssd_dir={folder}", "--ssd_gib=2"]
        serve = [sys.executable, "-m", "ca_jax.launch.serve", f"--model={args.model}", *sizes]
        browser = playwright.chromium.launch(executable_path=path, args=_ARGS)
        with started("ca_jax", lambda port: [*serve, f"--port={port}"], {}) as url:
            page = browser.new_page(viewport={"width": args.width, "height": args.height}, color_scheme="light")
            page.set_default_timeout(_WAIT_MS)
            page.goto(url)
            page.locator("#status[data-state=live]").wait_for()
            _converse(page)
            page.screenshot(path=args.out / "page.png")
            page.locator("#operate-open").click()
            page.locator("#charts .hours", has_text=_BEGUN).first.wait_for()
            page.screenshot(path=args.out / "operators.png")
            page.close()  # Before its server.
        browser.close()


def _converse(page: Page) -> None:
    for number, (said, documents) in enumerate(_TURNS):
        page.wait_for_timeout(number and _READ_MS)
        for document in documents:
            page.locator("#attached summary").click()  # A turn closes it.
            page.locator("#attach").click()
            page.locator("#documents textarea").last.fill(document)
        page.locator("#message").fill(said)
        page.locator("#message").press("Enter")
        page.locator("#messages > .assistant:not(.typing)").nth(number).wait_for()
    page.locator("#turn-phase", has_text="done").wait_for()


if __name__ == "__main__":
    main()
