"""Beam search over forks: every beam is a session, and a beam that is dropped gives its pages back.

python examples/tree_search.py "The three primary colours are" --width 3 --depth 12
"""

from __future__ import annotations

import argparse

import numpy as np

import quire


def beam_search(llm: quire.LLM, prompt: str, width: int, depth: int) -> list[tuple[float, str]]:
    """The likeliest continuations of a prompt, best first, with their log-probability."""
    root = llm.session().append(prompt)
    start = root.position
    beams = [(0.0, root)]
    for _ in range(depth):
        wanted: list[tuple[float, quire.Session, int]] = []
        for score, beam in beams:
            logits = beam.logits().astype(np.float64)
            logprobs = logits - np.logaddexp.reduce(logits)
            best = np.argsort(-logprobs)[:width]
            wanted += [(score + float(logprobs[token]), beam, int(token)) for token in best]
        wanted.sort(key=lambda found: -found[0])
        grown = [(score, beam.fork().append([token])) for score, beam, token in wanted[:width]]
        for _, beam in beams:
            beam.close()
        beams = grown
    found = [(score, llm.decode(beam.tokens[start:])) for score, beam in beams]
    for _, beam in beams:
        beam.close()
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="The three primary colours are")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--width", type=int, default=3)
    parser.add_argument("--depth", type=int, default=12)
    args = parser.parse_args()
    with quire.load(args.model) as llm:
        for score, text in beam_search(llm, args.prompt, args.width, args.depth):
            print(f"{score:7.3f}  {text!r}")


if __name__ == "__main__":
    main()
