"""The page for whoever sees, hears or types in other ways; and figures at their edges."""

from __future__ import annotations

import re
import threading
from itertools import product
from typing import Any

import pytest

from quire.server.page_routes import FILES
from tests.server.browser import Tab, sessions
from tests.server.rig import Rig

STYLE = (FILES / "style.css").read_text()
HOLDERS = ["weights", "kv", "window", "state", "checkpoints", "cached", "compute", "other"]


def light(color: str) -> float:
    """How light a colour is, as WCAG counts it."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", [0, 1])
def test_colours_of_holders_are_told_from_what_is_behind_and_on_them(scheme: int) -> None:
    colors = dict(
        re.findall(r"--([\w-]+): (#\w{6})", re.findall(r":root \{(.*?)\}", STYLE, re.S)[scheme])
    )
    for one, other in product([*HOLDERS, *(f"s{n}" for n in range(8))], ["soft", "surface", "dot"]):
        low, high = sorted((light(colors[one]), light(colors[other])))
        assert (high + 0.05) / (low + 0.05) >= 3, (one, other)


def test_colours_stay_where_a_browser_has_its_own(server: Rig, tab: Tab) -> None:
    tab.page.emulate_media(forced_colors="active")
    server.post("/v1/sessions", prompt="Once upon a time")
    parts = "document.querySelectorAll('#budget-bar i:not([hidden], [data-kind=free])')"
    tab.until(f"{parts}.length > 2")
    colors = tab.page.eval_on_selector_all(
        "#budget-bar i:not([hidden], [data-kind=free])",
        "all => all.map(one => getComputedStyle(one).backgroundColor)",
    )
    assert len(set(colors)) > 2


def test_a_key_that_is_held_down_is_one_press(server: Rig, tab: Tab) -> None:
    server.post("/v1/sessions", id="story")
    tab.page.focus("[data-session=story] [data-act=close]")
    for _ in range(4):
        tab.page.keyboard.down("Enter")
    tab.page.keyboard.up("Enter")
    tab.page.wait_for_timeout(300)
    assert "story" in sessions(server)


def test_arrow_keys_stay_on_the_cells_that_are_drawn(server: Rig, tab: Tab) -> None:
    tab.page.focus("[data-pool=attention] canvas")
    for _ in range(30):
        tab.page.keyboard.press("ArrowDown")
    told = tab.text("[data-pool=attention] .probe")
    width = tab.page.evaluate("document.querySelector('[data-pool=attention] canvas').clientWidth")
    assert int(re.findall(r"\d+", told)[0]) <= 3 * (width // 13 + 1)


def test_no_holder_is_without_a_name(server: Rig, tab: Tab) -> None:
    for number in range(70):
        server.post("/v1/sessions", id=f"one-{number}", prompt="Hello")
    tab.until("document.querySelectorAll('#holders > div').length > 60")
    names = tab.page.locator("#holders dt").all_inner_texts()
    assert "" not in names and "other sessions" in names


def test_requests_of_one_id_are_as_many_rows(server: Rig, tab: Tab) -> None:
    def ask() -> None:
        server.http.post(
            "/v1/completions",
            json={"prompt": "Once", "max_tokens": 4},
            headers={"x-request-id": "same"},
        )

    asking = [threading.Thread(target=ask) for _ in range(3)]
    for one in asking:
        one.start()
    for one in asking:
        one.join()
    tab.until("document.querySelectorAll('tr[data-request=same][data-state=done]').length === 3")


def test_a_silent_server_is_not_called_live(chromium: Any, server: Rig) -> None:
    tab = Tab(chromium, "about:blank")
    tab.page.clock.install()
    tab.page.goto(server.url)
    tab.wrong.clear()
    tab.live()
    server.state.live.close()
    tab.page.clock.fast_forward(12_000)
    tab.until("document.querySelector('#live').textContent === 'no news from the server'")
    tab.page.clock.fast_forward(60_000)  # it asks again, and is told again
    tab.until("document.querySelector('#live').dataset.state === 'lost'")
    tab.page.clock.fast_forward(1_000)
    tab.live()
    tab.context.close()
