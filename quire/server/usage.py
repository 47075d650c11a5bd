"""What an answer took besides time: tokens, and pages of memory."""

from __future__ import annotations

from typing import Any

from quire.api.texts import ChatPrompt
from quire.engine.work import Job
from quire.text.tokenizer import Tokenizer


def usage(
    jobs: list[Job], firsts: list[Job], chat: ChatPrompt | None, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Tokens, as OpenAI counts them; `firsts`: one job for each prompt; `chat`: the only one."""
    prompt = sum(job.prompt_tokens for job in firsts)
    made = sum(len(job.token_ids) for job in jobs)
    cached = sum(job.sequence.cached for job in firsts)
    details: dict[str, object] = {"cached_tokens": cached}
    reasons = [job.sequence.miss for job in firsts if job.sequence.miss]
    if reasons and prompt > cached:
        details["cache_miss"] = {"reason": reasons[0], "tokens": prompt - cached}
    told = {
        "prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made,
        "prompt_tokens_details": details,
    }  # fmt: skip
    if chat is not None:
        told["completion_tokens_details"] = _reasoned(jobs, chat, tokenizer)
    return told


def _reasoned(jobs: list[Job], chat: ChatPrompt, tokenizer: Tokenizer) -> dict[str, int]:
    """How many of the tokens that answers to a conversation have are reasoning."""
    answers = [[tokenizer.token_bytes(token) for token in job.token_ids] for job in jobs]
    return {"reasoning_tokens": sum(chat.style.reasoned(chat.text, one) for one in answers)}


def memory(jobs: list[Job]) -> dict[str, int]:
    """What jobs held when they ended, and at most."""
    held = [job.held for job in jobs if job.held]
    return {
        "pages": sum(h.pages for h in held),
        "pages_shared": sum(h.pages_shared for h in held),
        "bytes": sum(h.bytes for h in held),
        "peak_bytes": sum(job.peak_bytes for job in jobs),
    }
