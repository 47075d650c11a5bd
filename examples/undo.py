"""Undo: marks in a session cost nothing, and going back to one moves no bytes.

python examples/undo.py
"""

from __future__ import annotations

import argparse

import quire


def story(llm: quire.LLM, lines: list[str], max_tokens: int) -> list[str]:
    """Tries each line at the same place, and takes it back."""
    tried = []
    with llm.session() as s:
        s.append("Once upon a time there was a lighthouse keeper.")
        mark = s.checkpoint()
        for line in lines:
            s.append(line)
            tried.append(line + s.generate(max_tokens=max_tokens).text)
            s.rewind(mark)
    return tried


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--max-tokens", type=int, default=32)
    args = parser.parse_args()
    with quire.load(args.model) as llm:
        for text in story(llm, [" One night,", " He never", " Every ship"], args.max_tokens):
            print("…" + text)


if __name__ == "__main__":
    main()
