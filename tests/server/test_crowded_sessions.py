"""Sessions that several clients use at once, and leave at any time, while the budget changes."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.rig import DENSE, HYBRID, serving

pytestmark = pytest.mark.host
WINDOW = DENSE.replace("tiny-dense", "tiny-window")
IDS = ["a", "b", "c", "d"]
USUAL = {200, 201, 404, 409, 429}


class Crowd:
    """Clients that do anything; what sessions said is kept, to be compared with the same alone."""

    def __init__(self, url: str, seed: int, budgets: list[int]) -> None:
        self.dice = random.Random(seed)
        self._budgets = budgets
        self._http = httpx.AsyncClient(base_url=url, timeout=60)
        self.said: list[tuple[list[int], str]] = []

    async def run(self, count: int) -> None:
        left = iter(range(count))

        async def client(number: int) -> None:
            for _ in left:
                await self._check(f"own-{number}") if self.dice.random() < 0.1 else await self._do()

        async with self._http:
            await asyncio.gather(*(client(number) for number in range(8)))

    async def _ask(
        self, method: str, path: str, body: Any = None, within: float = 60.0, also: int = 0
    ) -> tuple[int, bytes]:
        try:
            async with (
                asyncio.timeout(within),
                self._http.stream(method, path, json=body) as answer,
            ):
                told = await answer.aread()
        except TimeoutError:
            return 0, b""
        assert answer.status_code in USUAL | {also}, (path, body, answer.status_code, told)
        return answer.status_code, told

    async def _do(self) -> None:
        """Something with one of the sessions that all share, often not to its end."""
        dice = self.dice
        tokens = [300 + dice.randrange(4)] * dice.choice([1, 5, 60, 300])
        one, other, mark = dice.choice(IDS), dice.choice(IDS), dice.choice("xy")
        say = {"temperature": 0, "ignore_eos": True, "max_tokens": dice.choice([1, 8, 60])}
        talk = [{"role": "user", "content": dice.choice(["hello there", "hello you"])}]
        method, path, body = dice.choice([
            ("POST", "", {"id": one, "prompt": tokens, "ttl_s": dice.choice([0.5, 30])}),
            ("POST", "", {"open": other, "id": one}),
            ("POST", f"/{one}/append", {"prompt": tokens[:60]}),
            ("POST", f"/{one}/fork", {"id": other}),
            ("POST", f"/{one}/checkpoint", {"name": mark}),
            ("POST", f"/{one}/rewind", {"to": mark}),
            ("POST", f"/{one}/rewind", {"tokens": dice.choice([1, 3, 20])}),
            ("POST", f"/{one}/save", {"name": other}),
            ("DELETE", f"/{one}", None),
            ("GET", dice.choice(["", f"/{one}?tokens=1", "/../memory"]), None),
            ("PATCH", "/../memory", {"budget_bytes": dice.choice(self._budgets)}),
            ("POST", "/../memory/forget", {}),
            ("POST", "/../completions", {"prompt": tokens, "n": 2, **say}),
            ("POST", "/../completions", {"session_id": one, "prompt": tokens[:5], **say}),
            ("POST", "/../completions", {"session_id": one, "stream": True, **say}),
            ("POST", "/../chat/completions", {"session_id": one, "messages": talk, **say}),
        ])  # fmt: skip
        path = f"/v1/sessions{path}".replace("/sessions/..", "")
        within = dice.choice([dice.expovariate(12), 60.0])
        also = 0 if method == "GET" else 400  # too long, or to go back too far
        await self._ask(method, path, body, within, also)

    async def _check(self, own: str) -> None:
        """A fork that nobody else uses says what its tokens make any model say."""
        for one in self.dice.sample(IDS, len(IDS)):
            if (await self._ask("POST", f"/v1/sessions/{one}/fork", {"id": own}))[0] == 201:
                break
        else:  # none is there that nobody else uses
            begin = {"id": own, "prompt": [300] * 60}
            if (await self._ask("POST", "/v1/sessions", begin, also=400))[0] != 201:
                return
        if self.dice.random() < 0.5:
            await self._ask("POST", f"/v1/sessions/{own}/save")
            await self._ask("DELETE", f"/v1/sessions/{own}")
            await self._ask("POST", "/v1/sessions", {"open": own, "id": own})
        status, told = await self._ask("GET", f"/v1/sessions/{own}?tokens=1")
        if status != 200:  # a fork lives no longer than what it was forked from
            return
        tokens = json.loads(told)["tokens"]
        body = {"session_id": own, "prompt": [11], "max_tokens": 8, "temperature": 0}
        status, told = await self._ask(
            "POST", "/v1/completions", {**body, "ignore_eos": True}, also=400
        )
        if status == 200:
            self.said.append(([*tokens, 11], json.loads(told)["choices"][0]["text"]))
        await self._ask("DELETE", f"/v1/sessions/{own}")


def check(folder: Path, model: str, count: int) -> None:
    load = {"kv_cache_tokens": 2100, "swap_space": "64MiB"}
    with serving(folder, model, max_running=6, max_queue=20, load=load) as rig:
        told = rig.llm.memory.as_dict()
        full, used = told["budget_bytes"], told["used_bytes"]
        crowd = Crowd(rig.url, count, [full, used + (3 << 20), used + (8 << 20)])
        asyncio.run(crowd.run(count))
        assert rig.http.patch("/v1/memory", json={"budget_bytes": full}).status_code == 200
        for session in rig.http.get("/v1/sessions").json()["data"]:
            assert rig.http.delete(f"/v1/sessions/{session['id']}").status_code == 200
        assert rig.pages() == 0 and rig.state.models.default.users == 0
        assert len(crowd.said) > count / 200
        for tokens, text in crowd.said:
            assert rig.complete(tokens, 8)["choices"][0]["text"] == text


def test_a_crowd(tmp_path: Path) -> None:
    check(tmp_path, HYBRID, 160)


@pytest.mark.slow
@pytest.mark.parametrize("model", [DENSE, HYBRID, WINDOW])
def test_a_large_crowd(tmp_path: Path, model: str) -> None:
    check(tmp_path, model, 3000)
