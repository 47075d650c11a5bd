"""`/metrics` for Prometheus, under the names that dashboards for vLLM know, with our prefix."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram
from prometheus_client import generate_latest as latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.requests import Request
from starlette.responses import Response

from quire.engine.work import Job

if TYPE_CHECKING:
    from quire.server.records import Record
    from quire.server.run import Ask
    from quire.server.state import State

_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 30, 60, 120, 300)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_MODEL = ["model_name"]


def reason_of(job: Job) -> str:
    """How a job ended, in vLLM's words."""
    return job.finish_reason if job.finish_reason in ("stop", "length") else "abort"


class Metrics:
    """Counters and histograms of what requests came to."""

    def __init__(self, models: Iterable[str]) -> None:
        self.registry = CollectorRegistry()
        self._prompt = self._counter("prompt_tokens", "Prompt tokens")
        self._made = self._counter("generation_tokens", "Tokens generated")
        self._asked = self._counter("prefix_cache_queries", "Prompt tokens looked up")
        self._hit = self._counter("prefix_cache_hits", "Prompt tokens that were in memory")
        self._misses = self._counter("prefix_cache_misses", "Prompts computed, by why", "reason")
        self._ended = self._counter(
            "request_success", "Answers, by how they ended", "finished_reason"
        )
        self._first = self._histogram("time_to_first_token_seconds", "Until the first token")
        self._each = self._histogram(
            "request_time_per_output_token_seconds", "Between tokens, mean"
        )
        self._whole = self._histogram("e2e_request_latency_seconds", "Until the last token")
        self._queue = self._histogram("request_queue_time_seconds", "In the queue")
        self._prefill = self._histogram("request_prefill_time_seconds", "Reading the prompt")
        self._decode = self._histogram("request_decode_time_seconds", "After the first token")
        self._prompts = self._histogram("request_prompt_tokens", "Tokens of a prompt", _TOKENS)
        self._answers = self._histogram("request_generation_tokens", "Tokens of an answer", _TOKENS)
        for model in models:
            self._begin(model)

    def _begin(self, model: str) -> None:
        """What will be counted is there at zero before: a rate needs to know where it began."""
        for counter in (self._prompt, self._made, self._asked, self._hit):
            counter.labels(model)
        for reason in ("stop", "length", "abort"):
            self._ended.labels(model, reason)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"quire:{name}", text, [*_MODEL, *labels], registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(f"quire:{name}", text, _MODEL, registry=self.registry, buckets=buckets)

    def observe(self, record: Record) -> None:
        """A request that generated is over."""
        assert record.run is not None
        model = record.run.ask.model.name
        for job in record.run.firsts:
            self._prompt.labels(model).inc(job.prompt_tokens)
            self._prompts.labels(model).observe(job.prompt_tokens)
            self._asked.labels(model).inc(job.prompt_tokens)
            self._hit.labels(model).inc(job.sequence.cached)
            if job.sequence.miss:
                self._misses.labels(model, job.sequence.miss).inc()
        self._queue.labels(model).observe(record.admitted - record.waits_since)
        for job in record.jobs:
            made = len(job.token_ids)
            self._ended.labels(model, reason_of(job)).inc()
            self._made.labels(model).inc(made)
            self._answers.labels(model).observe(made)
            if made:
                self._first.labels(model).observe(job.first - record.arrived)
                self._prefill.labels(model).observe(job.first - job.started)
                self._decode.labels(model).observe(job.last - job.first)
                self._whole.labels(model).observe(job.last - record.arrived)
            if made > 1:
                self._each.labels(model).observe((job.last - job.first) / (made - 1))

    def gave_up(self, ask: Ask) -> None:
        """Somebody left the queue."""
        self._ended.labels(ask.model.name, "abort").inc(len(ask.prompts) * ask.n)


class _Now:
    """What can be read off the server at any moment."""

    def __init__(self, state: State) -> None:
        self._state = state

    def collect(self) -> Iterable[Metric]:
        """Figures as they are."""
        state = self._state
        told = state.records.told()
        states = ("running", ("reading", "generating")), ("waiting", ("waiting",))
        for name, which in states:
            gauge = GaugeMetricFamily(
                f"quire:num_requests_{name}", f"Requests {name}", labels=_MODEL
            )
            for model in state.models.by_name:
                n = sum(one["model"] == model and one["state"] in which for one in told)
                gauge.add_metric([model], n)
            yield gauge
        yield from self._memory()

    def _memory(self) -> Iterable[Metric]:
        usage = GaugeMetricFamily(
            "quire:kv_cache_usage_perc", "What pages take of what weights leave, 0 to 1",
            labels=_MODEL,
        )  # fmt: skip
        held = GaugeMetricFamily("quire:memory_used_bytes", "Bytes held", labels=_MODEL)
        limit = GaugeMetricFamily("quire:memory_budget_bytes", "The budget", labels=_MODEL)
        preempted = CounterMetricFamily(
            "quire:num_preemptions", "Sequences that gave way", labels=_MODEL
        )
        for model in self._state.models.loaded:
            engine, budget = model.llm.engine, model.llm.budget
            pages = sum(pool.committed for pool in engine.memory.pools)
            fixed = budget.used - pages
            usage.add_metric([model.name], pages / max(budget.limit - fixed, 1))
            held.add_metric([model.name], budget.used)
            limit.add_metric([model.name], budget.limit)
        for model in self._state.models.by_name.values():  # what is counted never falls
            preempted.add_metric([model.name], model.preempted)
        yield from (usage, held, limit, preempted)


async def metrics(request: Request) -> Response:
    """All of it as text."""
    state: State = request.app.state.quire
    now = CollectorRegistry()
    now.register(_Now(state))
    body = latest(state.records.metrics.registry) + latest(now)
    return Response(body, media_type=CONTENT_TYPE_LATEST)
