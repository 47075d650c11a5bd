"""How long an answer took, under llama.cpp's names."""

from __future__ import annotations

from quire.engine.work import Job


def timings(jobs: list[Job], firsts: list[Job]) -> dict[str, float]:
    """Of several choices, from the first start to the last token; `firsts`: one for each prompt."""
    started, first = min(j.started for j in jobs), max(j.first for j in jobs)
    last = max(j.last for j in jobs)
    cached = sum(job.sequence.cached for job in firsts)
    prompt_n = sum(job.prompt_tokens for job in firsts) - cached
    made = sum(len(job.token_ids) for job in jobs)
    begun = sum(bool(job.token_ids) for job in jobs)  # a first token comes with the prompt
    prompt_ms, made_ms = (first - started) * 1e3, (last - first) * 1e3
    return {
        "cache_n": cached,
        **speed("prompt", prompt_n, prompt_n, prompt_ms),
        **speed("predicted", made, made - begun, made_ms),
        **_drafts(jobs),
    }


def speed(name: str, n: int, taken: int, ms: float) -> dict[str, float]:
    """How many tokens there were, and what those took that took the time."""
    return {
        f"{name}_n": n,
        f"{name}_ms": ms,
        f"{name}_per_token_ms": ms / taken if taken else 0.0,
        f"{name}_per_second": taken / ms * 1e3 if ms else 0.0,
    }


def _drafts(jobs: list[Job]) -> dict[str, float]:
    """How many tokens were drafted and right, where somebody drafts."""
    found = [job.sequence.speculation for job in jobs if job.sequence.speculation]
    if not found:
        return {}
    drafted, accepted = sum(one.drafted for one in found), sum(one.accepted for one in found)
    return {"draft_n": drafted, "draft_n_accepted": accepted}
