"""A real browser for tests of the page: Chromium, driven by Playwright. Where one of them is
missing the test is skipped, and says which.

`pip install 'keepstep[browser]'` brings Playwright. It looks for its own Chromium
(`playwright install chromium`), then for the machine's.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# As root Chromium refuses its own sandbox; a container has little shared memory, and jobs need it.
PATIENCE_MS = 60_000
ARGUMENTS = ["--no-sandbox", "--disable-dev-shm-usage"]


def browser_path(playwright: Any) -> str | None:
    """Where Chromium is; None: nowhere."""
    own = str(playwright.chromium.executable_path)
    return own if os.path.exists(own) else next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def chromium() -> Iterator[Any]:
    """A browser. Skips the test where there is none."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="no Playwright: pip install 'keepstep[browser]'"
    )
    with api.sync_playwright() as playwright:
        path = browser_path(playwright)
        if path is None:
            pytest.skip("no Chromium: playwright install chromium, or apt-get install chromium")
        browser = playwright.chromium.launch(executable_path=path, args=ARGUMENTS)
        yield browser
        browser.close()


class Visit:
    """A page that is open. `asked`: what it asked for; `complaints`: what its console said."""

    def __init__(self, browser: Any, url: str, **options: Any) -> None:
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.asked: list[str] = []
        self.complaints: list[str] = []
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.on("console", lambda said: self.complaints.append(f"{said.type}: {said.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.goto(url)
        self.until("#release", "0")

    def text(self, selector: str) -> str:
        """What a person reads there."""
        return str(self.page.inner_text(selector))

    def until(self, selector: str, words: str) -> None:
        """Until these words are there. Not by a script: the page's policy allows none but its
        own."""
        found = self.page.locator(selector).filter(has_text=words)
        found.wait_for(state="attached", timeout=PATIENCE_MS)

    def close(self) -> None:
        self.context.close()
