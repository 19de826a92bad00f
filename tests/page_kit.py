"""What tests of the page share: a browser, pages that may not complain, and what is done on one.

`tests/server/conftest.py` has the fixtures.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.server_kit import MODEL

_IS_REQUIRED = os.environ.get("REQUIRE_CHROMIUM") == "1"  # As CI says: without a browser these tests fail.
_NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
_CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, _NAMES)), None)
_ARGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
_WAIT_MS = 30_000
SAID = "(each) => each.said"
"""What an answer is, under what is shown of its Markdown."""


@contextlib.contextmanager
def chromium() -> Iterator[Any]:
    """A browser; skips the test where there is none and none is required."""
    sync_api = (importlib.import_module if _IS_REQUIRED else pytest.importorskip)("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        path = _CHROMIUM or playwright.chromium.executable_path  # That of `playwright install chromium`.
        if not Path(path).exists() and not _IS_REQUIRED:
            pytest.skip(
                f"needs chromium: on the path, named by _CHROMIUM or installed by playwright, got none at {path}"
            )
        launched = playwright.chromium.launch(executable_path=path, args=_ARGS)
        yield launched
        launched.close()


@contextlib.contextmanager
def pages_of(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages; says afterwards that none of them asked elsewhere or complained of anything but `expected`."""
    asked, complaints, expected = [], [], []
    with contextlib.ExitStack() as stack:

        def opened(url, *, may_complain=(), **options):
            expected.extend(may_complain)
            context = browser.new_context(**options)
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(_WAIT_MS)
            page.on("request", lambda request: asked.append((urlsplit(url).netloc, request.url)))
            page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.goto(url)
            return page

        yield opened
    assert [wanted for host, wanted in asked if urlsplit(wanted).netloc != host] == []
    assert [text for text in complaints if not any(part in text for part in expected)] == []


def is_live(page: Any) -> None:
    """Waits until the page is told what the server does."""
    page.locator("#status[data-state=live]").wait_for()
    page.locator("#model", has_text=MODEL).wait_for()


def say(page: Any, text: str, max_tokens: int | None = None) -> str:
    """Sends a message by the keyboard alone and waits for the answer to end."""
    if max_tokens is not None:
        page.evaluate("(count) => (document.getElementById('max-tokens').value = count)", max_tokens)
    page.locator("#message").focus()
    page.keyboard.insert_text(text)
    page.keyboard.press("Enter")
    page.locator("#messages > .assistant:last-child:not(.typing)").wait_for()
    return page.locator("#messages > .assistant:last-child .text").evaluate(SAID)
