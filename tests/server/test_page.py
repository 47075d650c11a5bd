"""The page in a real browser: what it shows is what the server says, and its buttons work."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests import tiny
from tests.server.browser import Tab, sessions
from tests.server.page_tour import PICTURES, tour
from tests.server.rig import DENSE, HYBRID, Rig, serving

KEY = "a-key-of-the-test"


def branch(server: Rig) -> None:
    """A session, a mark in it, a fork that went on, and requests without a session."""
    server.post("/v1/sessions", id="story", prompt="Once upon a time there was a girl. " * 6)
    server.post("/v1/sessions/story/checkpoint", name="start")
    server.complete(" She", session_id="story", most=20)
    server.post("/v1/sessions/story/fork", id="other")
    server.complete(" They", session_id="other", most=20)
    server.complete("Something else that is long enough to be kept for others", most=8)
    server.complete("Something else that is long enough to be kept for others, again", most=8)


def data(tab: Tab, selector: str, *names: str) -> dict[str, str]:
    """Figures that an element has for whoever reads it by program."""
    found: dict[str, str] = tab.page.eval_on_selector(selector, "one => ({...one.dataset})")
    return {name: found[name] for name in names}


def test_every_panel_shows_what_the_server_says(server: Rig, tab: Tab) -> None:
    branch(server)
    body = {"prompt": "Something else that is long enough to be kept", "max_tokens": 8}
    done = server.http.post("/v1/completions", json=body, headers={"x-request-id": "mine"}).json()
    tab.page.wait_for_selector("tr[data-request=mine][data-state=done]", timeout=1000)
    usage = done["usage"]
    cells = tab.page.locator("tr[data-request=mine] td").all_inner_texts()
    assert cells[:5] == [
        "mine", done["choices"][0]["finish_reason"], str(usage["prompt_tokens"]),
        str(usage["prompt_tokens_details"]["cached_tokens"]), str(usage["completion_tokens"]),
    ]  # fmt: skip
    assert cells[5].endswith("s") and float(cells[6]) > 0
    time.sleep(0.6)  # a look after the last request
    memory = server.http.get("/v1/memory").json()
    check_budget(tab, memory)
    for name, group in memory["stats"].items():
        shown = data(tab, f"[data-pool='{name}']", "used", "shared")
        assert shown == {"used": str(group["pages_used"]), "shared": str(group["pages_shared"])}
    for id, one in sessions(server).items():
        shown = data(tab, f"[data-session='{id}']", "position", "bytes", "shared")
        assert shown == {
            "position": str(one["position"]), "bytes": str(one["memory"]["bytes"]),
            "shared": str(one["memory"]["bytes_shared"]),
        }  # fmt: skip
        assert f"{one['position']} tokens" in tab.text(f"[data-session='{id}'] .facts")
        assert tab.text(f"[data-session='{id}'] .status") == one["status"] == "idle"
    prefix = memory["prefix"]
    for name in ("hits", "tokens_saved", "entries", "pinned", "evictions"):
        assert tab.text(f"[data-figure={name}] dd") == f"{prefix[name]:,}"
    for reason, n in prefix["misses"].items():
        assert tab.text(f"[data-reason='{reason}'] dd") == f"{n:,}"
    assert tab.text("#tree > li > ul [data-session] .name") == "other"  # below what it came from
    mark = sessions(server)["story"]["checkpoints"][0]
    told = tab.text("[data-session=story] [data-mark=start]")
    assert told == f"Rewind to start at {mark['position']}"


def check_budget(tab: Tab, memory: dict[str, Any]) -> None:
    """The parts are those of the report, and add up to what is used."""
    parts = tab.page.eval_on_selector_all(
        "#budget-parts > div",
        "all => all.map(one => [one.dataset.part, Number(one.dataset.bytes)])",
    )
    shown, uses = dict(parts), memory["uses"]
    assert shown["weights"] == uses["weights"]
    assert shown["compute"] == memory["compute_bytes"]
    cached = sum(size for use, size in uses.items() if use.endswith(": cached prefixes"))
    assert shown["cached prefixes"] == cached > 0
    assert sum(shown.values()) == memory["budget_bytes"]
    assert shown["free"] == memory["budget_bytes"] - memory["used_bytes"]


def test_the_map_says_who_holds_which_pages(server: Rig, tab: Tab) -> None:
    branch(server)
    tab.until("document.querySelector('#holders [data-holder=\"session other\"]')")
    time.sleep(0.6)
    pages = data(tab, "#holders [data-holder='session story']", "pages")["pages"]
    assert int(pages) == sessions(server)["story"]["memory"]["pages"]
    tab.page.focus("[data-pool=attention] canvas")
    tab.page.keyboard.press("ArrowRight")
    told = tab.text("[data-pool=attention] .probe")
    assert told.startswith("Page 0: held by ") and "story" in told and "other" in told
    assert told.endswith("; shared")


def test_buttons_do_what_they_say(server: Rig, tab: Tab) -> None:
    server.post("/v1/sessions", id="story", prompt="Once upon a time " * 4)
    before = server.http.get("/v1/sessions/story").json()["position"]
    tab.press("checkpoint", "story")
    tab.page.wait_for_selector("[data-session=story] [data-act=rewind]")
    server.complete(" there", session_id="story", most=9)
    assert sessions(server)["story"]["position"] > before
    tab.press("rewind", "story")
    tab.until(f"document.querySelector('[data-session=story]').dataset.position === '{before}'")
    assert sessions(server)["story"]["position"] == before
    tab.press("fork", "story")
    tab.page.wait_for_selector("[data-session='story.1']")
    fork = sessions(server)["story.1"]
    assert fork["parent"] == "story" and fork["position"] == before
    tab.press("save", "story")
    tab.until("document.querySelector('#notice').textContent.startsWith('Saved story')")
    assert (server.state.sessions.folder / "story.quire").is_file()
    tab.press("close", "story.1")
    assert "story.1" in sessions(server), "it takes a second press"
    assert tab.page.get_by_role("button", name="Close for good? story.1").count() == 1
    assert tab.text("#notice") == "Press again to close story.1 for good"
    tab.press("close", "story.1")
    tab.until("!document.querySelector('[data-session=\"story.1\"]')")
    assert list(sessions(server)) == ["story"]


def test_news_is_there_within_a_second(server: Rig, tab: Tab) -> None:
    for id in ("one", "two", "three"):
        server.post("/v1/sessions", id=id)
        made = time.monotonic()
        tab.page.wait_for_selector(f"[data-session={id}]", timeout=1000)
        assert time.monotonic() - made < 1.0
    tab.page.wait_for_selector("#sessions-empty", state="hidden", timeout=1000)


def test_forks_and_rewinds_are_seen_in_the_chat(server: Rig, tab: Tab) -> None:
    tab.send("Tell me a story.")
    first = tab.said()
    assert first[0] == "Tell me a story." and first[1]
    assert list(sessions(server)) == ["chat-1"]
    tab.press("checkpoint", "chat-1")
    tab.page.wait_for_selector("[data-mark=mark-1]")
    tab.page.click("#fork-here")
    tab.page.wait_for_selector("[data-session='chat-1.1']")
    tab.send("Another one.")
    assert tab.said()[:3] == [*first, "Another one."]
    assert "shared with chat-1" in tab.text("#log .turn")
    tab.page.click("#branches button:has-text('chat-1') >> nth=0")
    assert tab.said() == first
    tab.send("And then?")
    assert len(tab.said()) == 4
    tab.press("rewind", "chat-1")
    tab.until("document.querySelectorAll('#log .turn').length === 2")
    assert tab.said() == first
    tab.page.reload()
    tab.live()
    tab.page.click("[data-session='chat-1.1'] .name")
    assert tab.said()[:3] == [*first, "Another one."]


def test_what_others_made_is_shown_and_goes_on(server: Rig, tab: Tab) -> None:
    server.post("/v1/sessions", id="theirs", prompt="Once upon a time")
    tab.page.click("[data-session=theirs] .name")
    tab.until("document.querySelector('#log').textContent.includes('Once upon a time')")
    tab.send(" in a land")
    tab.until("document.querySelector('#log').textContent.includes('Once upon a time in a land')")
    held = server.llm.decode(server.http.get("/v1/sessions/theirs?tokens=1").json()["tokens"])
    tab.send(" and more" * 300)  # than fit: refused, so it is nothing that the session holds
    tab.until("document.querySelector('#log .turn').lastChild.textContent.length < 2000")
    assert tab.text("#log .turn > span") == held
    assert "fit" in tab.text("#notice")
    tab.wrong = [text for text in tab.wrong if "400" not in text]  # the browser's own words


def test_thoughts_and_cuts_are_seen(chromium: Any, tmp_path: Path) -> None:
    """An answer that is cut within its reasoning has no text, and is there all the same."""
    template = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}<|im_start|>assistant
<think>
"""
    metadata = {"tokenizer.chat_template": template, "general.sampling.temp": 0.0}
    tiny.write(tmp_path / "thinker.gguf", tiny.Tiny(context=512), metadata)
    with serving(tmp_path, str(tmp_path / "thinker.gguf")) as server:
        tab = Tab(chromium, server.url).live()
        tab.send("Hello")
        assert tab.said() == ["Hello", ""]
        assert len(tab.text("#log .turn[data-role=assistant] .reasoning")) > 20
        assert "assistant, cut after 64 tokens" in tab.text("#log .turn[data-role=assistant] .who")
        tab.close()


def test_what_was_not_sent_is_not_lost(server: Rig, tab: Tab) -> None:
    tab.send("Hello")
    said = tab.said()
    tab.page.route("**/v1/chat/completions", lambda asked: asked.abort())
    tab.send("Are you there?")
    assert tab.text("#notice") == "The server cannot be reached."
    assert tab.said() == said and tab.page.input_value("#message") == "Are you there?"
    tab.page.unroute("**/v1/chat/completions")
    tab.page.press("#message", "Enter")
    tab.until("document.querySelector('#composer').dataset.answers === '3'")
    assert tab.said()[: len(said) + 1] == [*said, "Are you there?"]
    tab.wrong = [text for text in tab.wrong if "ERR_FAILED" not in text]  # the browser's own words


def test_a_conversation_outlives_the_server(chromium: Any, tmp_path: Path) -> None:
    """Where it was saved: the page asks the next server for it."""
    with serving(tmp_path, save_sessions="drain") as rig:
        tab = Tab(chromium, rig.url).live()
        rig.post("/v1/sessions", id="another", prompt="Once")
        tab.send("Hello there")
        name, said = tab.text("#chat-h"), tab.said()
    tab.page.wait_for_selector("#live[data-state=lost]")
    with serving(tmp_path, port=rig.port):
        tab.live()
        assert (tab.text("#chat-h"), tab.said()) == (name, said)
        tab.send("And then?")
        assert tab.said()[:2] == said and len(tab.said()) == 4
    tab.context.close()


def test_a_second_press_makes_a_second_session(server: Rig, tab: Tab) -> None:
    """Though the page has not heard of the first."""
    tab.page.evaluate("for (let i = 0; i < 3; i++) document.querySelector('#new-session').click()")
    tab.page.wait_for_selector("[data-session='chat-3']")
    assert sorted(sessions(server)) == ["chat-1", "chat-2", "chat-3"]


def test_figures_of_a_server_that_began_anew_are_its_own(chromium: Any, tmp_path: Path) -> None:
    with serving(tmp_path) as rig:
        tab = Tab(chromium, rig.url).live()
        rig.complete("Once upon a time", most=40)
        tab.page.wait_for_timeout(600)
    tab.page.wait_for_selector("#live[data-state=lost]")
    with serving(tmp_path, port=rig.port) as rig:
        tab.live()
        tab.page.wait_for_timeout(600)
        assert "-" not in tab.text("#plot-tokens"), "its counters begin at 0"
        rig.complete("Once upon a time", most=4)
        tab.until("document.querySelector('#plot-hits').textContent.endsWith('minutes 0%')")
    tab.context.close()


def test_focus_stays_where_it_is(server: Rig, tab: Tab) -> None:
    """Though an answer ends, or a session that stood before is closed by others."""
    server.post("/v1/sessions", id="other")
    tab.send("Hello")
    tab.page.wait_for_selector("[data-session=chat-1]")
    tab.page.fill("#message", "And then?")
    tab.page.evaluate(
        "document.querySelector('#composer').requestSubmit();"
        "document.querySelector('[data-session=chat-1] .name').focus()"
    )
    tab.until("document.querySelector('#composer').dataset.answers === '2'")
    focused = "document.activeElement.textContent"
    assert tab.page.evaluate(focused) == "chat-1"
    server.http.delete("/v1/sessions/other")
    tab.until("!document.querySelector('[data-session=other]')")
    assert tab.page.evaluate(focused) == "chat-1"


def test_many_holders_of_pages_do_not_push_the_rest_away(server: Rig, tab: Tab) -> None:
    for number in range(40):
        server.post("/v1/sessions", id=f"one-{number}", prompt="Hello")
    tab.until("document.querySelectorAll('#holders > div').length > 40")
    list_of_them = "document.querySelector('#holders')"
    assert tab.page.evaluate(f"{list_of_them}.clientHeight") <= 240
    assert tab.page.evaluate(f"{list_of_them}.tabIndex") == 0


def test_a_key_is_asked_for_and_kept_in_the_tab(chromium: Any, tmp_path: Path) -> None:
    with serving(tmp_path, api_keys=(KEY,)) as server:
        tab = Tab(chromium, server.url)
        tab.page.wait_for_selector("#key-dialog[open]")
        tab.page.fill("#key", "no \N{RIGHT SINGLE QUOTATION MARK} can be sent")
        tab.page.press("#key", "Enter")
        assert tab.page.locator("#key-dialog[open]").count() == 1
        for key in ("wrong", KEY):
            tab.page.wait_for_selector("#key-dialog[open]")
            tab.page.fill("#key", key)
            tab.page.press("#key", "Enter")
        tab.live()
        kept = tab.page.evaluate("[Object.keys(localStorage).length, document.cookie]")
        assert kept == [0, ""]
        tab.wrong = [text for text in tab.wrong if "401" not in text]  # the browser's own words
        tab.close()


def test_sessions_talk_to_their_own_model(chromium: Any, tmp_path: Path) -> None:
    with serving(tmp_path, DENSE, HYBRID) as server:
        tab = Tab(chromium, server.url).live()
        assert tab.text("#model") == "no model loaded"
        tab.page.select_option("#new-model", "tiny-hybrid")
        tab.page.click("#new-session")
        tab.page.wait_for_selector("[data-session='chat-1']")
        assert sessions(server)["chat-1"]["model"] == "tiny-hybrid"
        for name in ("tiny-dense", "tiny-hybrid"):
            server.post("/v1/sessions", id=name, model=name)
            tab.page.click(f"[data-session={name}] .name")
            tab.send("Hello")
            assert len(tab.said()) == 2
        tab.page.wait_for_selector("[data-pool='delta state']")
        assert tab.text("#model") == "tiny-dense, tiny-hybrid"
        empty = tab.page.locator("#budget-parts > div[data-bytes='0']:visible").count()
        assert empty == 0, "of several models only parts that there are"
        tab.close()


def test_no_figures_are_left_of_models_that_were_given_back(chromium: Any, tmp_path: Path) -> None:
    with serving(tmp_path, DENSE, HYBRID, keep_alive_s=0.5) as server:
        tab = Tab(chromium, server.url).live()
        server.complete("Once upon a time", model="tiny-dense")
        tab.page.wait_for_selector("#prefix-figures dd")
        tab.until("document.querySelector('#model').textContent === 'no model loaded'")
        assert tab.text("#budget-sum") == tab.text("#budget-parts") == ""
        assert tab.text("#prefix-rate") == tab.text("#prefix-figures") == ""
        tab.close()


def test_all_of_it_works_by_keyboard(server: Rig, tab: Tab) -> None:
    tab.page.focus("#new-session")
    tab.page.keyboard.press("Enter")
    tab.page.wait_for_selector("[data-session='chat-1']")
    tab.page.focus("#new-session")
    reached = []
    for _ in range(8):
        tab.page.keyboard.press("Tab")
        here = tab.page.evaluate_handle("document.activeElement")
        reached.append(here.evaluate("one => one.ariaLabel ?? one.textContent"))
    assert reached[:5] == [
        "chat-1",
        "Fork chat-1",
        "Checkpoint chat-1",
        "Save chat-1",
        "Close chat-1",
    ]
    focused = "document.activeElement.dataset.act ?? ''"
    tab.page.focus("[data-act=fork]")
    time.sleep(0.7)  # updates leave the focus where it is
    assert tab.page.evaluate(focused) == "fork"
    nameless = tab.page.eval_on_selector_all(
        "button, textarea, input, select, canvas:not([aria-hidden] *)",
        "all => all.filter(one => !(one.ariaLabel || one.textContent.trim() || "
        "one.labels?.length)).length",
    )
    assert nameless == 0


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_a_narrow_screen(chromium: Any, server: Rig, dark: bool) -> None:
    branch(server)
    tab = Tab(chromium, server.url, width=400, dark=dark).live()
    tab.page.wait_for_selector("[data-session=other]")
    assert tab.page.evaluate("document.documentElement.scrollWidth") <= 400
    tab.page.wait_for_selector("#requests-table tbody tr")
    table = "document.querySelector('#requests .scroll')"
    assert tab.page.evaluate(f"{table}.scrollWidth - {table}.clientWidth") <= 0
    tab.close()


def test_long_names_stay_in_their_panels(chromium: Any, server: Rig) -> None:
    id, name = "s" * 128, "m" * 128
    server.post("/v1/sessions", id=id, prompt="Once upon a time")
    server.post(f"/v1/sessions/{id}/checkpoint", name=name)
    server.post(f"/v1/sessions/{id}/fork", id="f" * 128)
    for width in (400, 1400):
        tab = Tab(chromium, server.url, width=width).live()
        tab.page.click(f"[data-session={id}] .name")
        tab.page.wait_for_selector("#branches button")
        cut = tab.page.eval_on_selector_all(
            "section :is(h2, button, dt, .facts)",
            "all => { const right = one => one.getBoundingClientRect().right;"
            "return all.filter(one => one.clientWidth && one.scrollWidth > one.clientWidth + 1 || "
            "right(one) > right(one.closest('section'))).map(one => one.textContent) }",
        )
        assert cut == []
        tab.close()


@pytest.mark.slow
def test_the_pictures_of_the_docs_can_be_taken(chromium: Any, server: Rig, tmp_path: Path) -> None:
    tour(chromium, server, tmp_path)
    for name in PICTURES:
        assert (tmp_path / name).stat().st_size > 20_000
        assert (Path(__file__).parents[2] / "docs" / "images" / name).is_file()
