"""Best of n: one prompt, n answers from forks that share its pages, the likeliest one wins.

python examples/best_of_n.py "Write one sentence about the sea." --n 4
"""

from __future__ import annotations

import argparse

import quire


def best_of(llm: quire.LLM, prompt: str, n: int, max_tokens: int) -> list[tuple[float, str]]:
    """Answers with their mean log-probability per token, best first."""
    tokens = llm.chat_tokens([{"role": "user", "content": prompt}]) if llm.has_template else prompt
    answers = []
    with llm.session() as start:
        start.append(tokens)  # computed once, for all
        for seed in range(n):
            with start.fork() as branch:
                made = branch.generate(
                    temperature=0.8, seed=seed, max_tokens=max_tokens, logprobs=0
                )
            assert made.logprobs is not None
            score = sum(entry.logprob for entry in made.logprobs) / len(made.logprobs)
            answers.append((score, made.text.strip()))
    return sorted(answers, reverse=True)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="Write one sentence about the sea.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=48)
    args = parser.parse_args()
    with quire.load(args.model) as llm:
        for score, text in best_of(llm, args.prompt, args.n, args.max_tokens):
            print(f"{score:7.3f}  {text}")


if __name__ == "__main__":
    main()
