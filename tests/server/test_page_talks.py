"""The page's chat and the sessions that others change, stop or end beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.server.browser import Tab, sessions
from tests.server.rig import Rig, serving, serving_slowly

LOG = "document.querySelector('#log').textContent"


def test_what_others_add_to_a_conversation_is_shown(server: Rig, tab: Tab) -> None:
    tab.send("Hello")
    said, end = tab.said(), sessions(server)["chat-1"]["position"]
    server.post("/v1/sessions/chat-1/append", prompt=" and that was added")
    tab.until(f"{LOG}.includes(' and that was added')")
    assert tab.said() == said
    assert "takes its place" in tab.text("#log .turn[data-role=context] .who")
    more = sessions(server)["chat-1"]["position"] - end
    server.post("/v1/sessions/chat-1/rewind", tokens=more)
    tab.until(f"!{LOG}.includes('added')")
    assert tab.said() == said


def test_what_others_take_back_is_unsaid(server: Rig, tab: Tab) -> None:
    tab.send("Hello")
    said, end = tab.said(), sessions(server)["chat-1"]["position"]
    server.post("/v1/sessions/chat-1/checkpoint", name="there")
    tab.send("And then?")
    assert len(tab.said()) == 4
    server.post("/v1/sessions/chat-1/rewind", to="there")
    tab.until("document.querySelectorAll('#log .turn').length === 2")
    assert tab.said() == said
    assert sessions(server)["chat-1"]["position"] == end


def test_nothing_was_said_in_another_session_of_the_same_name(server: Rig, tab: Tab) -> None:
    tab.send("Hello")
    tab.page.wait_for_selector("[data-session=chat-1]")
    tab.page.wait_for_timeout(1100)  # so that it was made in another second
    server.http.delete("/v1/sessions/chat-1")
    server.post("/v1/sessions", id="chat-1", prompt="Made anew")
    tab.page.wait_for_timeout(600)
    tab.page.click("[data-session=chat-1] .name")
    tab.until(f"{LOG}.includes('Made anew')")
    assert tab.said() == []


def test_a_stopped_answer_is_shown_as_far_as_it_was_made(chromium: Any, tmp_path: Path) -> None:
    with serving_slowly(tmp_path) as server:
        tab = Tab(chromium, server.url).live()
        answer = "document.querySelector('#log .turn[data-role=assistant]:last-child')"
        answers = "Number(document.querySelector('#composer').dataset.answers ?? 0)"
        for n, asked in enumerate(("Hello", "And then?"), 1):
            tab.page.fill("#message", asked)
            tab.page.press("#message", "Enter")
            tab.until(f"{answer} && {answer}.lastChild.textContent")
            stop = (
                "document.querySelector('#stop').click(), document.querySelector('#log').ariaBusy"
            )
            assert tab.page.evaluate(stop) == "true", "it is stopped before its end"
            tab.until(f"{answers} === {n}")
            held = server.http.get("/v1/sessions/chat-1?tokens=1").json()["tokens"]
            assert server.llm.decode(held).endswith(f"assistant\n{tab.said()[-1]}")
        assert tab.page.get_attribute("#log", "aria-busy") == "false"
        tab.close()


def test_a_conversation_that_was_lost_says_so_and_can_go_on(chromium: Any, tmp_path: Path) -> None:
    """Its server ended and had not saved it."""
    with serving(tmp_path) as rig:
        tab = Tab(chromium, rig.url).live()
        tab.send("Hello there")
        said = tab.said()
        tab.page.wait_for_selector("[data-session=chat-1]")
    tab.page.wait_for_selector("#live[data-state=lost]")
    with serving(tmp_path, port=rig.port) as rig:
        rig.post("/v1/sessions", id="another", prompt="Once")
        tab.live()
        tab.until(f"{LOG}.includes('chat-1 is not on the server any more')")
        assert tab.said() == said and tab.text("#chat-h") == "Chat"
        tab.send("And then?")
        assert tab.said()[:3] == [*said, "And then?"] and tab.text("#chat-h") == "Chat in chat-2"
        tab.page.wait_for_timeout(600)
        assert tab.page.locator("#log [data-role=context], #log [data-role=nobody]").count() == 0
        held = rig.http.get("/v1/sessions/chat-2?tokens=1").json()["tokens"]
        assert said[0] in rig.llm.decode(held)
    tab.context.close()


def test_a_context_that_could_not_be_read_is_read_later(server: Rig, tab: Tab) -> None:
    server.post("/v1/sessions", id="theirs", prompt="Once upon a time")
    tab.page.route("**/detokenize", lambda asked: asked.fulfill(status=503, body="{}"))
    tab.page.click("[data-session=theirs] .name")
    tab.until("document.querySelector('#notice').textContent.includes('503')")
    tab.page.unroute("**/detokenize")
    tab.until(f"{LOG}.includes('Once upon a time')")
    tab.wrong = [text for text in tab.wrong if "503" not in text]  # the browser's own words
