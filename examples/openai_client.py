"""The openai package against `quire serve`: a chat, a stream, JSON that fits a schema.

pip install openai
quire serve &
python examples/openai_client.py
"""

from __future__ import annotations

import sys

from openai import OpenAI

URL = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8080"
client = OpenAI(base_url=f"{URL}/v1", api_key="none")
MODEL = client.models.list().data[0].id
ASK = {"role": "user", "content": "Name a city and how many people live there."}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 30}, "people": {"type": "integer"}},
    "required": ["city", "people"],
}


def main() -> None:
    """Three ways to ask."""
    answer = client.chat.completions.create(model=MODEL, messages=[ASK], max_tokens=40)
    print(answer.choices[0].message.content)
    print(answer.usage)

    stream = client.chat.completions.create(
        model=MODEL, messages=[ASK], max_tokens=40, temperature=0, stream=True
    )
    for part in stream:
        print(part.choices[0].delta.content or "", end="", flush=True)
    print()

    form = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA}}
    made = client.chat.completions.create(
        model=MODEL, messages=[ASK], max_tokens=80, response_format=form
    )
    print(made.choices[0].message.content)


if __name__ == "__main__":
    main()
