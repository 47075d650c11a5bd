"""Uses the page as somebody would, and takes the pictures of the docs meanwhile.

python -m tests.server.page_tour docs/images        (needs Pillow besides)
"""

from __future__ import annotations

import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.server.browser import Tab, browser
from tests.server.rig import Rig, serving

PICTURES = ("page-light.png", "page-dark.png", "page-narrow.png")
_FACTS = "The lighthouse keeper writes down every ship that passes, its flag and its hour. "


@contextmanager
def busy(server: Rig, n: int) -> Any:
    """Others who use the server at the same time."""
    done = threading.Event()

    def ask(number: int) -> None:
        while not done.is_set():
            prompt = f"{_FACTS * 4}Question {number}: what does the keeper do?"
            body = {"prompt": prompt, "max_tokens": 48, "temperature": 0.7, "ignore_eos": True}
            server.http.post("/v1/completions", json=body)

    clients = [threading.Thread(target=ask, args=(number,), daemon=True) for number in range(n)]
    for client in clients:
        client.start()
    try:
        yield
    finally:
        done.set()
        for client in clients:
            client.join()


def tour(chromium: Any, server: Rig, folder: Path) -> None:
    """A talk, a mark in it, two ways to go on, and others who ask as well."""
    light = Tab(chromium, server.url).live()
    light.send("Tell me about the sea in two sentences.")
    light.press("checkpoint", "chat-1")
    light.page.wait_for_selector("[data-act=rewind]")
    light.page.click("#fork-here")
    light.page.wait_for_selector("[data-session='chat-1.1']")
    light.send("Now as a pirate would say it.")
    light.press("fork", "chat-1")
    light.page.wait_for_selector("[data-session='chat-1.2']")
    dark = Tab(chromium, server.url, dark=True).live()
    narrow = Tab(chromium, server.url, width=400).live()
    for tab in (dark, narrow):
        tab.page.click("[data-session='chat-1.1'] .name")
    with busy(server, 3):
        light.page.wait_for_timeout(9000)
        for tab, name in zip((light, dark, narrow), PICTURES, strict=True):
            tab.page.evaluate("scrollTo(0, 0)")
            tab.page.mouse.move(0, 0)
            tab.page.screenshot(path=folder / name, full_page=True)
    for tab in (light, dark, narrow):
        tab.close()


def main() -> None:
    """Takes the pictures with the default model."""
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    load = {"memory_budget": "224MiB", "n_ctx": 2048, "threads": 2}
    with tempfile.TemporaryDirectory() as saved, browser() as chromium:  # noqa: SIM117
        with serving(Path(saved), "smollm2", load=load) as server:
            tour(chromium, server, folder)
    for name in PICTURES:
        shrink(folder / name)


def shrink(path: Path) -> None:
    """A picture with fewer colours takes a third of the bytes."""
    from PIL import Image

    picture = Image.open(path).convert("RGB")
    picture.quantize(200, dither=Image.Dither.NONE).save(path, optimize=True)


if __name__ == "__main__":
    main()
