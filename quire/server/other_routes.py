"""Routes beside OpenAI's: other dialects, metrics, and the events that the page follows."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.routing import Route

from quire.server import (
    anthropic_routes,
    chat_routes,
    embedding_routes,
    live,
    llamacpp_about,
    llamacpp_routes,
    metrics,
    ollama_about,
    ollama_routes,
    responses_routes,
)
from quire.server.dialect import Handler

_POSTS: dict[str, tuple[Handler, type[msgspec.Struct]]] = {
    "/v1/embeddings": (embedding_routes.embeddings, embedding_routes.EmbeddingsBody),
    "/embeddings": (embedding_routes.embeddings, embedding_routes.EmbeddingsBody),
    "/v1/responses": (responses_routes.responses, responses_routes.ResponsesBody),
    "/responses": (responses_routes.responses, responses_routes.ResponsesBody),
    "/v1/responses/input_tokens": (responses_routes.input_tokens, responses_routes.ResponsesBody),
    "/v1/chat/completions/input_tokens": (chat_routes.input_tokens, chat_routes.ChatBody),
    "/chat/completions/input_tokens": (chat_routes.input_tokens, chat_routes.ChatBody),
    "/v1/messages": (anthropic_routes.messages, anthropic_routes.MessagesBody),
    "/v1/messages/count_tokens": (anthropic_routes.count_tokens, anthropic_routes.MessagesBody),
    "/api/generate": (ollama_routes.generate, ollama_routes.GenerateBody),
    "/api/chat": (ollama_routes.chat, ollama_routes.OllamaChatBody),
    "/api/show": (ollama_about.show, ollama_about.ShowBody),
    "/api/embed": (embedding_routes.embed, embedding_routes.EmbedBody),
    "/api/embeddings": (embedding_routes.embed, embedding_routes.EmbedBody),
    "/completion": (llamacpp_routes.completion, llamacpp_routes.LlamaBody),
    "/infill": (llamacpp_routes.infill, llamacpp_routes.InfillBody),
}
_GETS: dict[str, Handler] = {
    "/metrics": metrics.metrics,
    "/v1/memory/events": live.events,
    "/api/tags": ollama_about.tags,
    "/api/ps": ollama_about.loaded,
    "/api/version": ollama_about.version,
    "/props": llamacpp_about.props,
    "/slots": llamacpp_about.slots,
}
OTHER_BODIES = {("POST", path): body for path, (_, body) in _POSTS.items()}
"""What they read."""
OTHER_ERRORS: dict[str, dict[str, Any]] = {
    path: anthropic_routes.ERROR if path.startswith("/v1/messages") else ollama_routes.ERROR
    for path in _POSTS
    if path.startswith(("/v1/messages", "/api/"))
}
"""How some refuse, in their own form."""


def other_routes() -> list[Route]:
    """All of them."""
    posts = [Route(path, handler, methods=["POST"]) for path, (handler, _) in _POSTS.items()]
    return posts + [Route(path, handler, methods=["GET"]) for path, handler in _GETS.items()]
