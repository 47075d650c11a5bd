"""Sessions that threads use over HTTP, while memory is short: each is what its own deeds made it.

A shadow keeps the tokens and marks that a session must have; what is generated in it must be what
its tokens make the model say elsewhere, with room for all. Whatever is refused changes nothing.
"""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

import quire
from tests.server.rig import DENSE, HYBRID, Rig, serving

pytestmark = pytest.mark.host
WINDOW = DENSE.replace("tiny-dense", "tiny-window")
MOST = 1200


class Full(Exception):
    """There is no room for it now."""


@dataclass
class Shadow:
    """What a session, or a file, must hold."""

    id: str
    tokens: list[int]
    marks: dict[str, list[int]] = field(default_factory=dict)

    def twin(self, id: str) -> Shadow:
        return Shadow(id, list(self.tokens), dict(self.marks))


class Oracle:
    """The model by itself."""

    def __init__(self, path: str) -> None:
        self._llm = quire.load(path, threads=1)
        self._lock = threading.Lock()

    def says(self, tokens: list[int], count: int) -> list[int]:
        with self._lock:
            return self._llm.generate(
                tokens, max_tokens=count, temperature=0, ignore_eos=True
            ).token_ids


class Client:
    """One that does anything with sessions of its own."""

    def __init__(self, rig: Rig, oracle: Oracle, number: int, budgets: list[int]) -> None:
        self.rig, self.oracle, self.number, self.budgets = rig, oracle, number, budgets
        self.dice = random.Random(number)
        self.http = httpx.Client(base_url=rig.url, timeout=60)
        self.mine: dict[str, Shadow] = {}
        self.saved: dict[str, Shadow] = {}
        self.made = self.full = 0

    def ask(self, method: str, path: str, body: Any = None, also: int = 200) -> Any:
        answer = self.http.request(method, f"/v1/{path}", json=body)
        while answer.status_code == 409 and answer.json()["error"]["code"] == "session_busy":
            time.sleep(0.01)  # somebody who left is not gone yet
            answer = self.http.request(method, f"/v1/{path}", json=body)
        if answer.status_code == 503:
            raise Full(answer.text)
        assert answer.status_code in (200, 201, also), (path, body, answer.text)
        return answer.json() if answer.status_code != also or also == 200 else None

    def tokens(self) -> list[int]:
        return [300 + self.dice.randrange(4)] * self.dice.choice([1, 3, 16, 17, 130])

    def new(self, shadow: Shadow) -> None:
        self.mine[shadow.id] = shadow

    def next_id(self) -> str:
        self.made += 1
        return f"own-{self.number}-{self.made}"

    def check(self, shadow: Shadow) -> None:
        told = self.ask("GET", f"sessions/{shadow.id}?tokens=1")
        assert told["tokens"] == shadow.tokens and told["position"] == len(shadow.tokens)
        marks = {mark["name"]: mark["position"] for mark in told["checkpoints"]}
        assert marks == {name: len(tokens) for name, tokens in shadow.marks.items()}

    # -- deeds ----------------------------------------------------------------------------------

    def create(self) -> None:
        id, tokens = self.next_id(), self.tokens()
        self.ask("POST", "sessions", {"id": id, "prompt": tokens})
        self.new(Shadow(id, tokens))

    def open(self) -> None:
        if self.saved:
            name, id = self.dice.choice(sorted(self.saved)), self.next_id()
            self.ask("POST", "sessions", {"open": name, "id": id})
            self.new(self.saved[name].twin(id))

    def resize(self) -> None:
        self.ask("PATCH", "memory", {"budget_bytes": self.dice.choice(self.budgets)}, also=409)

    def append(self, shadow: Shadow) -> None:
        tokens = self.tokens()
        self.ask("POST", f"sessions/{shadow.id}/append", {"prompt": tokens})
        shadow.tokens += tokens

    def fork(self, shadow: Shadow) -> None:
        id = self.next_id()
        self.ask("POST", f"sessions/{shadow.id}/fork", {"id": id})
        self.new(shadow.twin(id))

    def mark(self, shadow: Shadow) -> None:
        if (name := self.dice.choice("abc")) not in shadow.marks:
            self.ask("POST", f"sessions/{shadow.id}/checkpoint", {"name": name})
            shadow.marks[name] = list(shadow.tokens)

    def rewind(self, shadow: Shadow) -> None:
        if shadow.marks:
            name = self.dice.choice(sorted(shadow.marks))
            self.ask("POST", f"sessions/{shadow.id}/rewind", {"to": name})
            shadow.tokens = list(shadow.marks[name])
        elif count := min(self.dice.choice([1, 3, 20]), len(shadow.tokens)):
            self.ask("POST", f"sessions/{shadow.id}/rewind", {"tokens": count})
            del shadow.tokens[-count:]

    def save(self, shadow: Shadow) -> None:
        name = f"file-{self.number}-{self.dice.randrange(2)}"
        self.ask("POST", f"sessions/{shadow.id}/save", {"name": name})
        self.saved[name] = shadow.twin(name)

    def delete(self, shadow: Shadow) -> None:
        self.ask("DELETE", f"sessions/{shadow.id}")
        del self.mine[shadow.id]

    def generate(self, shadow: Shadow) -> None:
        body, wanted = self.request(shadow)
        self.ask("POST", "completions", body)
        shadow.tokens = wanted

    def request(self, shadow: Shadow) -> tuple[dict[str, Any], list[int]]:
        prompt, count = self.tokens()[:5], self.dice.choice([1, 8, 30])
        read = shadow.tokens + prompt
        body = {"session_id": shadow.id, "prompt": prompt, "max_tokens": count}
        return body | {"temperature": 0, "ignore_eos": True}, read + self.oracle.says(read, count)

    def leave(self, shadow: Shadow) -> None:
        """Goes away in the middle: what came until then stays, or nothing at all."""
        body, wanted = self.request(shadow)
        data = json.dumps({**body, "stream": self.dice.random() < 0.5}).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json"
        with socket.create_connection(("127.0.0.1", self.rig.port)) as connection:
            connection.sendall(f"{head}\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)
            time.sleep(self.dice.choice([0, 0.002, 0.02]))
        before = len(shadow.tokens) + len(body["prompt"])
        time.sleep(0.05)
        self.ask("POST", f"sessions/{shadow.id}/rewind", {"tokens": 0})  # once nobody owns it
        told = self.ask("GET", f"sessions/{shadow.id}?tokens=1")["tokens"]
        assert told == shadow.tokens or (len(told) > before and told == wanted[: len(told)])
        shadow.tokens = told

    def deed(self) -> Callable[[], None]:
        dice, shadows = self.dice, list(self.mine.values())
        if not shadows or dice.random() < 0.2:
            return dice.choice([self.create, self.open, self.resize] if len(shadows) < 5 else [
                self.resize
            ])  # fmt: skip
        shadow = dice.choice(shadows)
        ways = [self.rewind, self.generate, self.generate, self.leave, self.check, self.save]
        if len(shadow.tokens) < MOST:
            ways += [self.append, self.mark]
        else:
            ways = [self.delete]
        if len(shadows) < 5:
            ways.append(self.fork)
        way = dice.choice([*ways, self.delete] if len(shadows) > 2 else ways)
        return lambda: way(shadow)

    def run(self, count: int) -> None:
        for _ in range(count):
            try:
                self.deed()()
            except Full:
                self.full += 1
                for shadow in list(self.mine.values()):
                    self.check(shadow)
                if self.mine:
                    self.delete(self.dice.choice(list(self.mine.values())))
        for shadow in list(self.mine.values()):
            self.check(shadow)
            self.delete(shadow)


def check(folder: Path, model: str, count: int, swap: str) -> None:
    load = {"memory_budget": "64MiB", "n_ctx": 1500, "swap_space": swap}
    with serving(folder, model, load=load, max_running=6) as rig:
        oracle = Oracle(model)
        weights = rig.llm.model.weight_bytes
        budgets = [weights + n for n in (1 << 19, 1 << 20, 2 << 20, 40 << 20)]
        clients = [Client(rig, oracle, number, budgets) for number in range(4)]
        failed: list[BaseException] = []

        def run(client: Client) -> None:
            try:
                client.run(count)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=run, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]
        assert rig.http.patch("/v1/memory", json={"budget_bytes": 64 << 20}).status_code == 200
        assert rig.pages() == 0 and rig.state.models.default.users == 0


def test_sessions_are_what_was_done_to_them(tmp_path: Path) -> None:
    check(tmp_path, HYBRID, 40, "0")


@pytest.mark.slow
@pytest.mark.parametrize("swap", ["0", "1MiB", "64MiB"])
@pytest.mark.parametrize("model", [DENSE, HYBRID, WINDOW])
def test_many_sessions_are_what_was_done_to_them(tmp_path: Path, model: str, swap: str) -> None:
    check(tmp_path, model, 200, swap)
