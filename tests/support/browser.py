"""A real browser. Its visits also report errors that a user does not see: errors on the console, and failed requests."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
PATIENCE = 180_000
"""Milliseconds that a page is waited for."""

Open = Callable[..., "Visit"]

# Follow a link of the application: change the address, and notify the router.
_FOLLOW = "to => { history.pushState(null, '', to); dispatchEvent(new PopStateEvent('popstate', { state: null })); }"


@dataclass
class Visit:
    """A user with a browser.

    :param page: the page as playwright shows it.
    :param troubles: the errors found so far, in words. A test asserts that the list is empty.
    """

    page: Any
    url: str
    troubles: list[str] = field(default_factory=list)
    _is_loaded: bool = False

    def go(self, path: str, *, load: bool = False) -> None:
        """Go to a page: by loading it, or, where Airflow's application is loaded already, as a link in it does.

        :param path: below Airflow's base URL.
        :param load: load it in any case, as the address bar does.
        """
        address = f"{self.url}/{path.lstrip('/')}"
        if load or not self._is_loaded:
            self.page.goto(address)
            self._is_loaded = True
        else:
            self.page.evaluate(_FOLLOW, address)

    def leave(self) -> None:
        """Go to a page that sends no requests."""
        self.go("there-is-no-such-page")

    def close(self) -> None:
        """Close the browser."""
        self.page.context.close()

    def login(self, name: str, password: str) -> None:
        """Log in through Airflow's form."""
        self.page.locator("input[name=username]").fill(name)
        self.page.locator("input[name=password]").fill(password)
        self.page.get_by_role("button", name="Sign in").click()

    def see(self, selector: str, **options: Any) -> Any:
        """Wait until the element is visible."""
        found = self.page.locator(selector, **options).first
        found.wait_for()
        return found

    def gone(self, selector: str) -> None:
        """Wait until the element is no longer visible."""
        self.page.locator(selector).first.wait_for(state="detached")

    def fits(self) -> bool:
        """Return True if no part of the page has to be scrolled sideways."""
        return bool(
            self.page.evaluate(
                "() => [document.documentElement, document.querySelector('.aks')].every(e => e.scrollWidth <= e.clientWidth)"
            )
        )

    def watch(self) -> None:
        def failed(request: Any) -> None:
            # A page that is left lets go of what it was waiting for.
            if "ERR_ABORTED" not in str(request.failure):
                self.troubles.append(f"{request.method} {request.url}: {request.failure}")

        def answered(response: Any) -> None:
            # Airflow on SQLite answers by 500 while others write for long; its own pages ask again.
            airflows = response.status >= 500 and "/kafka-spark/" not in response.url
            if response.status >= 400 and not airflows:
                self.troubles.append(f"{response.request.method} {response.url}: {response.status}")

        def said(message: Any) -> None:
            # The browser repeats there what `answered` tells with the address.
            if message.type == "error" and not message.text.startswith("Failed to load resource"):
                self.troubles.append(f"console: {message.text}")

        def dialog(found: Any) -> None:
            self.troubles.append(f"dialog: {found.message}")
            found.dismiss()

        self.page.on("requestfailed", failed)
        self.page.on("response", answered)
        self.page.on("console", said)
        self.page.on("pageerror", lambda error: self.troubles.append(f"page: {error}"))
        self.page.on("dialog", dialog)


@contextmanager
def browser() -> Iterator[Open]:
    """Yield ``open(url, width=1280, theme="light", cookies=None)``, which makes visits. Without a chromium the test is skipped.

    The chromium is taken from ``CHROMIUM``, from the path, or from playwright.
    """
    sync_api = pytest.importorskip("playwright.sync_api")
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    with sync_api.sync_playwright() as playwright:
        if not path and not os.path.exists(playwright.chromium.executable_path):
            pytest.skip("no chromium: install one, or run `playwright install chromium`")
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS, headless=True)

        def make(url: str, *, width: int = 1280, height: int = 800, theme: str = "light", cookies: Any = None) -> Visit:
            context = chromium.new_context(
                viewport={"width": width, "height": height}, color_scheme=theme, locale="en-GB", timezone_id="UTC",
                reduced_motion="reduce",
            )  # fmt: skip
            context.set_default_timeout(PATIENCE)
            context.add_init_script(f"localStorage.setItem('theme', '{theme}')")
            if cookies:
                context.add_cookies(cookies)
            visit = Visit(context.new_page(), url.rstrip("/"))
            visit.watch()
            return visit

        yield make
        chromium.close()
