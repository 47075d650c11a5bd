"""Hostile requests: a clear refusal, never a crash, a hang or a partial change."""

from __future__ import annotations

import gzip
import io
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.errors import RequestError
from quire.server import protocol
from quire.server.app import routes
from quire.server.page_routes import is_file
from quire.server.settings import ServeSettings
from tests.server.rig import Rig, serving, turns

COMPLETE, CHAT = "/v1/completions", "/v1/chat/completions"


def raw(rig: Rig, data: bytes, within: float = 10.0) -> bytes:
    """What comes back for some bytes."""
    with socket.create_connection(("127.0.0.1", rig.port), timeout=within) as connection:
        with suppress(OSError):  # it may be refused before all of it was sent
            connection.sendall(data)
        got = b""
        with suppress(OSError):
            while part := connection.recv(65536):
                got += part
                if b"}}" in got:
                    break
        return got


def post(rig: Rig, path: str, body: bytes, kind: str = "application/json") -> httpx.Response:
    return rig.http.post(path, content=body, headers={"Content-Type": kind})


# -- JSON ---------------------------------------------------------------------------------------

BAD_BODIES = {
    "not json": b"{nope",
    "nothing": b"",
    "a list": b"[]",
    "nan": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": Infinity}',
    "too large a number": b'{"prompt": "a", "temperature": 1e999}',
    "large temperature": b'{"prompt": "a", "temperature": 1e308}',
    "negative max_tokens": b'{"prompt": "a", "max_tokens": -5}',
    "no tokens": b'{"prompt": "a", "max_tokens": 0}',
    "huge max_tokens": b'{"prompt": "a", "max_tokens": 100000000000000000000000}',
    "n": b'{"prompt": "a", "n": 1000000000}',
    "n of 0": b'{"prompt": "a", "n": 0}',
    "top_p": b'{"prompt": "a", "top_p": 7}',
    "min_p": b'{"prompt": "a", "min_p": -1}',
    "penalty": b'{"prompt": "a", "repetition_penalty": 0}',
    "logprobs": b'{"prompt": "a", "logprobs": 1000000}',
    "bias id": b'{"prompt": "a", "logit_bias": {"99999999": 1}}',
    "bias value": b'{"prompt": "a", "logit_bias": {"1": 1e300}}',
    "stop": b'{"prompt": "a", "stop": [1]}',
    "many stops": b'{"prompt": "a", "stop": [' + b'"ab",' * 10**6 + b'"c"]}',
    "a long stop": b'{"prompt": "a", "stop": "' + b"x" * 10**5 + b'"}',
    "ids": b'{"prompt": [1, 99999999]}',
    "negative ids": b'{"prompt": [-1]}',
    "mixed prompts": b'{"prompt": ["a", 1]}',
    "many prompts": b'{"prompt": [' + b'"a",' * 5000 + b'"a"]}',
    "prompt of another kind": b'{"prompt": {"a": 1}}',
    "deep": b'{"prompt": "a", "response_format": ' + b'{"a":' * 10_000 + b"1" + b"}" * 10_001,
    "deep list": b"[" * 10_000,
    "not utf-8": b'{"prompt": "\xff\xfe"}',
    "half a character": b'{"prompt": "\\ud800"}',
    "stream of another kind": b'{"prompt": "a", "stream": "yes"}',
    "no prompt": b"{}",
    "suffix": b'{"prompt": "a", "suffix": "b"}',
}


@pytest.mark.parametrize("what", BAD_BODIES)
def test_bad_bodies_are_refused(rig: Rig, what: str) -> None:
    answer = post(rig, COMPLETE, BAD_BODIES[what])
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "code", "param"} and error["message"]
    assert len(answer.content) < 4000  # what was sent is not sent back


@pytest.mark.parametrize(
    "messages",
    [
        [], [{}], [{"role": "user"}], [{"role": 7, "content": "a"}], ["a"], "a", None,
        [{"role": "user", "content": 7}], [{"role": "user", "content": [7]}],
        [{"role": "assistant", "content": 7}], [{"role": "assistant", "content": {"a": 7}}],
    ],
)  # fmt: skip
def test_bad_messages_are_refused(rig: Rig, messages: Any) -> None:
    rig.refused(400, CHAT, messages=messages)


def test_other_kinds_of_body(rig: Rig) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        assert post(rig, COMPLETE, b'{"prompt": "a"}', kind).status_code == 415
    assert post(rig, COMPLETE, b'{"prompt": "a"}', "application/json; charset=utf-8").is_success
    packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    answer = rig.http.post(COMPLETE, content=gzip.compress(b'{"prompt": "a"}'), headers=packed)
    assert answer.status_code == 415 and "gzip" in answer.json()["error"]["message"]


def test_a_body_has_one_length(rig: Rig) -> None:
    """Where it has two, a proxy may take for another request what is the rest of this one."""
    head = f"POST {COMPLETE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    lengths = "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert raw(rig, f"{head}{lengths}0\r\n\r\n".encode()).startswith(b"HTTP/1.1 400 ")


def test_old_clients_need_not_name_the_host(rig: Rig) -> None:
    assert raw(rig, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200 ")
    assert raw(rig, b"GET /health HTTP/1.1\r\n\r\n").startswith(b"HTTP/1.1 400 ")


def test_methods_and_paths(rig: Rig) -> None:
    for method, path, status in (
        ("GET", COMPLETE, 405), ("PUT", "/v1/memory", 405), ("POST", "/health", 405),
        ("GET", "/nothing", 404), ("GET", "/v1/sessions/a/b/c", 404), ("GET", "/..%2f..", 404),
        ("DELETE", "/v1/sessions", 405), ("OPTIONS", CHAT, 405),
    ):  # fmt: skip
        answer = rig.http.request(method, path)
        assert answer.status_code == status, path
        assert answer.json()["error"]["message"]
    assert "GET" in rig.http.put("/v1/memory").headers["allow"]


@pytest.mark.parametrize("many", [b"[]", b"{}", b"7"])
def test_bodies_of_too_many_values_are_not_read(rig: Rig, many: bytes) -> None:
    """Reading them holds everybody up."""
    for head in (b'{"prompt": "a", "x": [', b'{"prompt": ['):
        answer = post(rig, COMPLETE, head + many + (b"," + many) * 2_000_000 + b"]}")
        assert answer.status_code == 413 and "2,000,000" in answer.json()["error"]["message"]


def test_texts_are_one_value_however_long(rig: Rig) -> None:
    numbers = ", ".join(["7"] * 1000) + ' \\ " [{'
    texts = [numbers] * 2100
    error = rig.refused(400, "/v1/embeddings", model="tiny-dense", input=texts)
    assert error["param"] == "input"  # each of them is too long
    error = rig.refused(400, "/tokenize", content="[1,2]" * 800_000)
    assert error["code"] == "context_length_exceeded"
    many = b'{"prompt": [' + b'"a",' * 2_000_001 + b'"a"]}'
    assert post(rig, COMPLETE, many).status_code == 413


def test_large_bodies(tmp_path: Path) -> None:
    with serving(tmp_path, max_body=1 << 20) as rig:
        started = time.monotonic()
        head = f"POST {COMPLETE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        got = raw(rig, f"{head}Content-Length: 1000000000\r\n\r\n".encode())
        assert b" 413 " in got and time.monotonic() - started < 2  # before any of it came
        chunk = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
        got = raw(rig, f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + chunk * 3)
        assert b" 413 " in got
        got = raw(rig, f"{head}Content-Length: -5\r\n\r\n".encode())
        assert b" 400 " in got
        assert rig.complete("a", 1)


@pytest.mark.parametrize("chunked", [False, True])
def test_who_sends_all_of_it_before_reading_is_told_why_not(tmp_path: Path, chunked: bool) -> None:
    """A connection that is closed while more comes in is reset, and the answer lost."""
    body = b'{"prompt": "' + b"x" * (16 << 20) + b'"}'
    with serving(tmp_path, max_body=1 << 20, api_keys=("key",)) as rig:
        for path, key, status in ((COMPLETE, "key", 413), ("/nothing", "key", 413), ("/", "", 401)):
            headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
            data = io.BytesIO(body) if chunked else body
            request = urllib.request.Request(rig.url + path, data, headers)  # it says "close"
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=10)
            assert refused.value.code == (404 if chunked and path == "/nothing" else status)
            assert json.load(refused.value)["error"]["message"]


def test_large_heads(rig: Rig) -> None:
    for size, status in ((60_000, 200), (70_000, 431), (200_000, 431), (20 << 20, 431)):
        assert rig.http.get("/health", headers={"X": "x" * size}).status_code == status
    got = raw(rig, b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * (4 << 20))
    assert b" 431 " in got
    many = b"".join(b"X-%d: y\r\n" % i for i in range(100_000))
    got = raw(rig, b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + many + b"\r\n")
    assert b" 431 " in got
    assert b" 400 " in raw(rig, b"\x16\x03\x01 this is no HTTP\r\n\r\n")
    assert rig.http.get("/health").is_success


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_streams_are_framed_as_their_client_reads_them(rig: Rig, version: str) -> None:
    """One without a version that has chunks gets the body as it is, up to the end."""
    body = json.dumps({"prompt": "a", "max_tokens": 5, "temperature": 0, "stream": True}).encode()
    head = f"POST {COMPLETE} HTTP/{version}\r\nHost: localhost\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", rig.port), timeout=10) as connection:
        connection.sendall(head.encode() + body)
        answer = HTTPResponse(connection)
        answer.begin()
        assert answer.chunked == (version == "1.1")
        events = answer.read().split(b"\n\n")
    assert events[-2:] == [b"data: [DONE]", b""]
    assert all(event.startswith(b"data: {") for event in events[:-2])


# -- prompts, constraints -----------------------------------------------------------------------

CONSTRAINTS: list[dict[str, Any]] = [
    {"regex": "(" * 200 + "a" + ")" * 200 + "{1000000}"},
    {"regex": "[" },
    {"regex": "(a{1,1000}){1,1000}{1,1000}"},
    {"grammar": "start: a"},
    {"grammar": 'start: "a"{1,1000000}'},
    {"grammar": "start: start start"},
    {"grammar": "root ::= root root"},
    {"grammar": 'root ::= ((("a"{1,2000}){1,2000}){1,2000}){1,2000}'},
    {"grammar": "root ::= a" + " " * 5000 + "]"},
    {"json": {"$ref": "#"}},
    {"json": {"type": "array", "minItems": 10**6, "items": {"type": "string"}}},
    {"json": {"type": "string", "pattern": "(a+)+b{1,1000000}"}},
    {"json": {"type": 7}},
    {"choice": []},
    {"choice": [1]},
]  # fmt: skip


@pytest.mark.parametrize("wanted", CONSTRAINTS, ids=lambda w: json.dumps(w)[:40])
def test_hostile_constraints_end_soon(rig: Rig, wanted: dict[str, Any]) -> None:
    """Refused, or answered; the server does not hang on them, and others go on meanwhile."""
    started = time.monotonic()
    body = {"prompt": "a", "max_tokens": 4, "structured_outputs": wanted}
    answer = rig.http.post(COMPLETE, json=body)
    assert answer.status_code in (200, 400), answer.text
    assert time.monotonic() - started < 8
    assert rig.complete("a", 1)


def test_backtracking_does_not_blow_up(rig: Rig) -> None:
    answer = rig.complete("a", 24, structured_outputs={"regex": "(a+)+b"})
    assert set(answer["choices"][0]["text"]) <= set("ab")


def test_refusals_are_quick_and_leave_nothing(rig: Rig) -> None:
    before = rig.pages()
    for _ in range(30):
        rig.refused(400, COMPLETE, prompt=[300] * 2100)
        rig.refused(400, COMPLETE, prompt="a", structured_outputs={"regex": "["})
        rig.refused(400, COMPLETE, prompt=["a", "b", [1] * 3][:2], n=1, logit_bias={"999999": 1})
    assert rig.pages() == before == 0


# -- who may ask --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    with serving(tmp_path_factory.mktemp("locked"), api_keys=("first", "second")) as running:
        yield running


def test_every_route_needs_the_key(locked: Rig) -> None:
    asked = 0
    key = {"Authorization": "Bearer first"}
    described = locked.http.get("/openapi.json", headers=key).json()["paths"]
    for route in routes():
        if is_file(route.path):  # of the page: the same for everybody
            continue
        for method in sorted((route.methods or set()) - {"HEAD"}):
            path = route.path.replace("{id:path}", "x").replace("{id}", "x")
            for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "first"}):
                answer = locked.http.request(method, path, headers=headers)
                assert answer.status_code == 401, (method, path)
                assert answer.json()["error"]["code"] == "invalid_api_key"
                assert path.startswith("/v1/messages") == (answer.json().get("type") == "error")
            if (told := described.get(route.path.replace(":path}", "}"))) is not None:
                form = told[method.lower()]["responses"]["4XX"]["content"]["application/json"]
                error = form["schema"].get("properties", {}).get("error", {})
                assert "object" in error.get("type", "object"), path
            asked += 1
    assert asked > 20
    assert locked.http.get("/nothing").status_code == 401


def test_keys_open(locked: Rig) -> None:
    for name, key in (
        ("Authorization", "Bearer first"),
        ("Authorization", "bearer second"),
        ("x-api-key", "first"),
    ):
        assert locked.http.get("/health", headers={name: key}).is_success


def test_binding_elsewhere_needs_a_key() -> None:
    with pytest.raises(RequestError, match="--api-key"):
        ServeSettings(host="0.0.0.0")
    for empty in ("", " "):  # it would be that of everybody who sends none
        with pytest.raises(RequestError, match="empty"):
            ServeSettings(host="0.0.0.0", api_keys=("a", empty))
    ServeSettings(host="0.0.0.0", api_keys=("a",))
    ServeSettings(host="0.0.0.0", no_api_key=True)
    for host in ("127.0.0.1", "localhost", "::1", "127.3.2.1"):
        assert ServeSettings(host=host).on_loopback
    assert not ServeSettings(host="127.0.0.1.evil.com", no_api_key=True).on_loopback


def test_origins_are_as_browsers_send_them() -> None:
    """Any other is that of no page, and would let none in without a word."""
    for origin in ("https://chat.example/", "chat.example", "https://Chat.example", "https://", ""):
        with pytest.raises(RequestError, match="--allow-origin"):
            ServeSettings(origins=("*", origin))
    ServeSettings(origins=("*", "null", "http://[::1]:3000", "https://chat.example:8443"))


def test_browsers_elsewhere_are_not_answered(rig: Rig) -> None:
    for host in ("evil.com", "127.0.0.1.evil.com", "localhost.evil.com:80", ""):
        assert rig.http.get("/health", headers={"Host": host}).status_code == 403
    for host in ("localhost", "localhost:1234", "127.0.0.1", "[::1]:80"):
        assert rig.http.get("/health", headers={"Host": host}).is_success
    for strange in ("http://[", "://", "null", "http://evil.com:port", ""):
        assert rig.http.get("/health", headers={"Origin": strange}).status_code == 403
    evil = {"Origin": "http://evil.com"}
    assert rig.http.get("/v1/models", headers=evil).status_code == 403
    assert rig.http.post(COMPLETE, json={"prompt": "a"}, headers=evil).status_code == 403
    null = {"Origin": "null", "Content-Type": "text/plain"}
    assert rig.http.post(COMPLETE, content=b"{}", headers=null).status_code == 403
    mine = {"Origin": rig.url}
    answer = rig.http.get("/v1/models", headers=mine)
    assert answer.is_success
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_keys_are_compared_as_they_are_sent(tmp_path: Path) -> None:
    """Most programs send letters beyond ASCII as UTF-8, and browsers as Latin-1."""
    with serving(tmp_path, api_keys=("clé", "ключ")) as rig:
        for sent, status in (
            ("clé".encode(), 200), ("clé".encode("latin-1"), 200), ("ключ".encode(), 200),
            (b"cl?", 401), (b"????", 401), (b"cl\xff", 401),
        ):  # fmt: skip
            answer = rig.http.get("/v1/models", headers={b"Authorization": b"Bearer " + sent})
            assert answer.status_code == status, sent


@pytest.mark.parametrize("named", ["https://chat.example", "*"])
def test_pages_that_were_named_may_ask(tmp_path: Path, named: str) -> None:
    page = {"Origin": "https://chat.example"}
    with serving(tmp_path, api_keys=("first",), origins=(named,)) as rig:
        wants = {
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization, content-type",
        }
        may = rig.http.options(COMPLETE, headers={**page, **wants})  # browsers send no key with it
        assert may.status_code == 204 and not may.content
        assert "POST" in may.headers["access-control-allow-methods"]
        assert may.headers["access-control-allow-headers"] == "authorization, content-type"
        keys: list[dict[str, str]] = [{}, {"Authorization": "Bearer first"}]
        for key, status in zip(keys, (401, 200), strict=True):
            answer = rig.http.post(COMPLETE, json={"prompt": "a"}, headers={**page, **key})
            assert answer.status_code == status
            for one in (may, answer):
                assert one.headers["access-control-allow-origin"] == page["Origin"]
                assert "origin" in one.headers["vary"].lower()
        other = rig.http.get("/health", headers={"Origin": "https://evil.com", **keys[1]})
        assert other.status_code == (200 if named == "*" else 403)
        assert ("access-control-allow-origin" in other.headers) == (named == "*")
        evil = {**page, **keys[1], "Host": "evil.com"}
        assert rig.http.get("/health", headers=evil).status_code == 403


def test_errors_tell_no_paths(rig: Rig, tmp_path: Path) -> None:
    folder, model = str(rig.state.sessions.folder), str(rig.llm.path)
    (rig.state.sessions.folder / "bad.quire").write_bytes(b"x" * 100)
    tools = [{"type": "function", "function": {"name": "f"}}]
    told = [
        rig.http.post("/v1/sessions", json={"open": "bad"}).text,
        rig.http.post(CHAT, json={"messages": turns("a"), "tools": tools}).text,
        rig.http.post(CHAT, json={"messages": [{"role": "user"}]}).text,
        rig.http.get("/v1/memory").text, rig.http.get("/v1/models").text,
    ]  # fmt: skip
    for text in told:
        assert folder not in text and model not in text and str(Path.home()) not in text


def test_a_text_to_cut_up_is_held_in_memory_and_so_bounded(rig: Rig) -> None:
    longer = "word " * (rig.llm.n_ctx + 1)  # than what could be answered
    assert rig.post("/tokenize", content=longer)["count"] > rig.llm.n_ctx
    begun = time.process_time()
    error = rig.refused(400, "/tokenize", content="x" * (20 << 20))
    assert error["code"] == "context_length_exceeded" and time.process_time() - begun < 2
    assert rig.refused(400, "/detokenize", tokens=[5] * (1 << 19))["param"] == "tokens"


@pytest.mark.parametrize("said", [(), ("and then",)])
def test_what_is_longer_than_the_context_can_be_counted(rig: Rig, said: tuple[str, ...]) -> None:
    """That is how clients learn what to leave out."""
    longer = turns("word " * (rig.llm.n_ctx + 1), *said)
    read = rig.post("/tokenize", messages=longer)["count"]
    assert read > rig.llm.n_ctx
    for path in ("/v1/chat/completions/input_tokens", "/v1/messages/count_tokens"):
        assert rig.post(path, messages=longer)["input_tokens"] == read
    assert rig.post("/v1/responses/input_tokens", input=longer)["input_tokens"] == read
    assert longer[0]["content"] in rig.post("/apply-template", messages=longer)["prompt"]
    assert rig.refused(400, CHAT, messages=longer)["code"] == "context_length_exceeded"
    longer[0]["content"] = "word " * (1 << 18)
    error = rig.refused(400, "/apply-template", messages=longer)
    assert error["code"] == "context_length_exceeded"


def test_failures_inside_are_not_told(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **more: object) -> None:
        raise ValueError("/secret/path of somebody")

    monkeypatch.setattr(rig.llm.tokenizer, "encode", broken)
    answer = rig.http.post("/tokenize", json={"content": "a"})
    assert answer.status_code == 500 and "secret" not in answer.text
    assert answer.json()["error"]["type"] == "server_error"
    monkeypatch.undo()
    assert rig.complete("a", 1)


# -- tenants ------------------------------------------------------------------------------------


def test_salts_are_short(rig: Rig) -> None:
    """They stay in memory, beside the budget, for as long as what they are for."""
    long: dict[str, Any] = {"cache_salt": "x" * 2000}
    for path, body in (
        (COMPLETE, {"prompt": "a"}), (CHAT, {"messages": turns("a")}), ("/v1/sessions", {}),
        ("/completion", {"prompt": "a"}),
    ):  # fmt: skip
        assert rig.refused(400, path, **body, **long)["param"] == "cache_salt"
    rig.complete("a", 1, cache_salt="x" * 1000)
    error = rig.refused(400, "/v1/memory/forget", salt="x" * 2000)
    assert error["param"] == "salt" and error["message"].startswith("salt has")


def test_salts_share_nothing(tmp_path: Path) -> None:
    with serving(tmp_path) as rig:
        text = "A secret that is long enough to fill some pages of memory with its tokens. " * 4
        for salt in ("a", "b", "c"):
            usage = rig.complete(text, 4, cache_salt=salt)["usage"]["prompt_tokens_details"]
            assert usage["cached_tokens"] == 0
        assert rig.http.get("/v1/memory").json()["prefix"]["hits"] == 0
        usage = rig.complete(text, 4, cache_salt="a")["usage"]["prompt_tokens_details"]
        assert usage["cached_tokens"] > 0


def test_no_foreign_fact_appears(rig: Rig) -> None:
    """Sixteen clients at once, each with a name of its own: greedy text is as if it were alone."""
    prompts = [f"The name of the keeper is number {i}{i}{i}, and he said that" for i in range(16)]
    alone = []
    for prompt in prompts:
        alone.append(rig.complete(prompt, 24, cache_salt="alone")["choices"][0]["text"])
    found: dict[int, str] = {}

    def ask(i: int) -> None:
        with httpx.Client(base_url=rig.url, timeout=60) as http:
            body = {"prompt": prompts[i], "max_tokens": 24, "temperature": 0, "ignore_eos": True}
            found[i] = http.post(COMPLETE, json=body).json()["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[i] for i in range(16)] == alone


def test_greedy_text_is_the_same_under_load_and_preemption(tmp_path: Path) -> None:
    """64 clients in a memory that holds few of them."""
    load = {"kv_cache_tokens": 1200, "n_ctx": 512}
    prompts = [[300 + (7 * i + j) % 200 for j in range(10 + i)] for i in range(64)]
    with serving(tmp_path, load=load) as rig:
        found: dict[int, str] = {}

        def ask(i: int) -> None:
            with httpx.Client(base_url=rig.url, timeout=120) as http:
                body = {
                    "prompt": prompts[i],
                    "max_tokens": 40,
                    "temperature": 0,
                    "ignore_eos": True,
                }
                found[i] = http.post(COMPLETE, json=body).json()["choices"][0]["text"]

        threads = [threading.Thread(target=ask, args=(i,)) for i in range(64)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        done = rig.llm.memory.as_dict()["preemption"]
        assert done["parked"] + done["recomputed"] > 0
        rig.llm.forget()
        for i in range(0, 64, 5):
            assert found[i] == rig.complete(prompts[i], 40)["choices"][0]["text"]
        assert rig.pages() == 0


def test_a_sequence_that_cannot_fit_fails_alone(tmp_path: Path) -> None:
    with serving(tmp_path, load={"kv_cache_tokens": 256, "n_ctx": 2048}) as rig:
        failed = rig.http.post(
            COMPLETE, json={"prompt": [300] * 200, "max_tokens": 400, "ignore_eos": True}
        )
        assert failed.status_code == 503 and failed.headers["retry-after"]
        assert failed.json()["error"]["code"] == "out_of_memory"
        assert rig.complete("a", 8)["usage"]["completion_tokens"] == 8
        assert rig.pages() == 0


@pytest.mark.parametrize(
    "target, status",
    [
        ("http://localhost/health", 200), ("HTTP://localhost:80/health?x=1", 200),
        ("https://localhost/v1/models/none", 404), ("http://localhost", 200),
        ("http://localhost?x=1", 200), ("http:///health", 200), ("ftp://localhost/health", 404),
    ],
)  # fmt: skip
def test_whole_addresses_are_taken_for_their_path(rig: Rig, target: str, status: int) -> None:
    asked = f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    assert raw(rig, asked.encode()).startswith(f"HTTP/1.1 {status} ".encode())


# -- slow senders -------------------------------------------------------------------------------


def test_slow_senders_are_thrown_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred that send a byte now and then, a hundred that send nothing: one is served."""
    assert protocol.HEAD_S + protocol.BODY_S <= 75
    monkeypatch.setattr(protocol, "HEAD_S", 1.0)
    monkeypatch.setattr(protocol, "BODY_S", 1.5)
    with serving(tmp_path) as rig:
        idle = [socket.create_connection(("127.0.0.1", rig.port)) for _ in range(100)]
        slow = [socket.create_connection(("127.0.0.1", rig.port)) for _ in range(100)]
        head = f"POST {COMPLETE} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        for number, one in enumerate(slow):
            body = "Content-Length: 1000\r\n\r\n{" if number % 2 else ""
            one.sendall((head + body).encode())
        for _ in range(4):
            assert rig.complete("a", 4)["choices"]
            time.sleep(0.1)
            for one in slow:
                one.sendall(b" " if slow.index(one) % 2 else b"X")
        deadline = time.monotonic() + 5
        for one in idle + slow:
            one.settimeout(max(deadline - time.monotonic(), 0.1))
            got = b""
            while part := one.recv(4096):
                got += part
            assert b" 408 " in got
            one.close()
        assert rig.complete("a", 4)["choices"]
