"""An agent that tries several ways on from one place, and keeps the one it likes best.

The context is computed once; each attempt is a fork that moves no bytes, and what was not chosen is
closed. Needs nothing but a running server:

    quire serve &
    python examples/branching_agent.py
"""

from __future__ import annotations

import json
import sys
import urllib.request
from typing import Any

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
TASK = "A list of three good reasons to plant trees in a city:\n1."


def ask(method: str, path: str, **body: Any) -> Any:
    """What the server answers."""
    data = json.dumps(body).encode() if method == "POST" else None
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(URL + path, data, headers, method=method)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def attempt(root: str, seed: int) -> tuple[float, str, str]:
    """One way on from a session: how likely the model finds it, its branch, its text."""
    branch = ask("POST", f"/v1/sessions/{root}/fork")["id"]
    made = ask(
        "POST", "/v1/completions", session_id=branch, prompt="", max_tokens=24, seed=seed,
        temperature=0.9, stop=["\n"], logprobs=0,
    )  # fmt: skip
    (choice,) = made["choices"]
    chances = choice["logprobs"]["token_logprobs"]
    return sum(chances) / len(chances), branch, choice["text"]


def main() -> None:
    """Three steps, four attempts each."""
    here = ask("POST", "/v1/sessions", prompt=TASK)["id"]
    text = TASK
    for number in range(2, 5):
        attempts = [attempt(here, seed) for seed in range(4)]
        likely, best, line = max(attempts)
        for _, branch, _ in attempts:
            if branch != best:
                ask("DELETE", f"/v1/sessions/{branch}")
        ask("DELETE", f"/v1/sessions/{here}")
        here, text = best, f"{text}{line}\n{number}."
        told = ask("POST", f"/v1/sessions/{here}/append", prompt=f"\n{number}.")
        print(f"{likely:6.2f} {line.strip()}   {told['position']} tokens, {told['memory']}")
    ask("DELETE", f"/v1/sessions/{here}")
    print(text.rpartition("\n")[0])  # without the number of a fourth


if __name__ == "__main__":
    main()
