"""Chromium, driven by playwright; tests that need it are skipped where either is missing."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.server.rig import Rig

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


@contextmanager
def browser() -> Iterator[Any]:
    """A browser."""
    sync_api = pytest.importorskip("playwright.sync_api")
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            yield running
        finally:
            running.close()


class Tab:
    """A page, and everything that went wrong in it."""

    def __init__(self, browser: Any, url: str, width: int = 1280, dark: bool = False) -> None:
        scheme = "dark" if dark else "light"
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, reduced_motion="reduce"
        )
        self.page = self.context.new_page()
        self.wrong: list[str] = []
        self.page.set_default_timeout(20_000)
        self.page.on("pageerror", lambda error: self.wrong.append(str(error)))
        self.page.on("console", self._console)
        self.page.on("request", lambda sent: self._check(sent.url, url))
        self.page.goto(url)

    def _console(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.wrong.append(message.text)

    def _check(self, sent: str, url: str) -> None:
        if not sent.startswith(url):
            self.wrong.append(f"asked for {sent}")

    def live(self) -> Tab:
        """Waits for the first figures."""
        self.page.wait_for_selector("#live[data-state=live]")
        return self

    def text(self, selector: str) -> str:
        """What stands there."""
        return str(self.page.inner_text(selector))

    def said(self) -> list[str]:
        """The turns of the conversation that is shown, without who said them."""
        turns: list[str] = self.page.eval_on_selector_all(
            "#log .turn:not([data-role=context]):not([data-role=nobody])",
            "all => all.map(one => one.lastChild.textContent)",
        )
        return turns

    def send(self, text: str) -> None:
        """Says something in the chat, and waits for the answer."""
        answers = "Number(document.querySelector('#composer').dataset.answers ?? 0)"
        before = self.page.evaluate(answers)
        self.page.fill("#message", text)
        self.page.press("#message", "Enter")
        self.until(f"{answers} > {before}")

    def press(self, act: str, session: str) -> None:
        """A button of a session."""
        self.page.click(f".session[data-session='{session}'] [data-act={act}]")

    def until(self, js: str) -> None:
        """Waits until something is true; the page's own policy lets nobody else do so in it."""
        deadline = time.monotonic() + 20
        while not self.page.evaluate(f"Boolean({js})"):
            assert time.monotonic() < deadline, js
            self.page.wait_for_timeout(30)

    def close(self) -> None:
        """Nothing may have gone wrong."""
        self.context.close()
        assert self.wrong == []


def sessions(server: Rig) -> dict[str, Any]:
    """What the server says of its sessions, by id."""
    return {one["id"]: one for one in server.http.get("/v1/sessions").json()["data"]}
