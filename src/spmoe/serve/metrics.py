"""Prometheus metrics: vLLM's names where they exist, `spmoe_` ones for experts and prefetching."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from statistics import median

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from spmoe.engine.async_llm import AsyncLLM
from spmoe.engine.outputs import RequestOutput
from spmoe.observe.ledger import Counters

_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TPOT_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5)
_LATENCY_BUCKETS = (0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)

# totals of the process since the engine was built, by field of Counters
_TOTALS = (
    ("vllm:spec_decode_num_drafts", "verified", "Steps that verified draft tokens, of each completion."),
    ("vllm:spec_decode_num_draft_tokens", "drafted", "Draft tokens."),
    ("vllm:spec_decode_num_accepted_tokens", "accepted", "Draft tokens that the target accepted."),
    ("spmoe_steps", "steps", "Steps of the engine."),
    ("spmoe_expert_hits", "hits", "Routed experts that were in a slot."),
    ("spmoe_expert_late", "late", "Routed experts whose copy was in flight."),
    ("spmoe_expert_demand_loads", "demand_loads", "Routed experts that were loaded on demand."),
    ("spmoe_expert_demand_bytes", "demand_bytes", "Bytes of experts that were loaded on demand."),
    ("spmoe_cpu_experts", "cpu_experts", "Routed experts that were computed on the CPU."),
    ("spmoe_cpu_bytes", "cpu_bytes", "Bytes of experts that were computed on the CPU."),
    ("spmoe_cpu_seconds", "cpu_seconds", "Time that the CPU computed experts."),
    ("spmoe_cpu_copies", "cpu_copies", "Packed experts that were copied for the CPU."),
    ("spmoe_cpu_copy_seconds", "cpu_copy_seconds", "Time of these copies."),
    ("spmoe_cpu_failures", "cpu_failures", "Experts that the CPU failed to compute; they were loaded."),
    ("spmoe_prefetch_loads", "prefetch_loads", "Prefetched experts."),
    ("spmoe_prefetch_issued_bytes", "issued_bytes", "Bytes of prefetched experts."),
    ("spmoe_prefetch_used_bytes", "used_bytes", "Bytes of prefetched experts that were used."),
    ("spmoe_prefetch_late_bytes", "late_bytes", "Part of the used bytes that was still in flight when needed."),
    ("spmoe_prefetch_wasted_bytes", "wasted_bytes", "Bytes of prefetched experts that were evicted before use."),
    ("spmoe_prefetch_failed_bytes", "failed_bytes", "Bytes of prefetched experts whose copy failed."),
    ("spmoe_stall_seconds", "stall_seconds", "Time that compute waited for experts."),
    ("spmoe_draft_seconds", "draft_seconds", "Time of drafting."),
    ("spmoe_verify_seconds", "verify_seconds", "Time of verification by the target."),
)


_RECENT_SECONDS = 60.0  # age up to which a value counts for a recent median
_MAX_RECENT = 512  # values that a recent median is of, at most


class Metrics:
    """All metrics of one server, in a registry of their own."""

    def __init__(self, llm: AsyncLLM, model_name: str, waiting: Callable[[], int]) -> None:
        self.registry = CollectorRegistry()
        self._model = model_name
        labels = ("model_name",)

        def counter(name: str, text: str, *more: str) -> Counter:
            return Counter(name, text, (*labels, *more), registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, text, labels, buckets=buckets, registry=self.registry).labels(model_name)

        self.prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens.").labels(model_name)
        self.prefix_queries = counter(
            "vllm:prefix_cache_queries", "Prompt tokens that were looked up in earlier KV caches."
        ).labels(model_name)
        self.prefix_hits = counter(
            "vllm:prefix_cache_hits", "Prompt tokens that were taken from earlier KV caches."
        ).labels(model_name)
        self._generation_tokens = counter("vllm:generation_tokens", "Generated tokens.").labels(model_name)
        self.generated = 0  # value of that counter, which does not show it
        self._ended = counter("vllm:request_success", "Ended completions, by reason.", "finished_reason")
        self._responses = counter("spmoe_http_responses", "HTTP responses, by status.", "status")
        self.ttft = histogram("vllm:time_to_first_token_seconds", "Time to first token.", _TTFT_BUCKETS)
        self.step_tpot = histogram(
            "vllm:inter_token_latency_seconds", "Time per output token, of each step.", _TPOT_BUCKETS
        )
        self.tpot = histogram(
            "vllm:request_time_per_output_token_seconds",
            "Time per output token after the first step, of each request.",
            _TPOT_BUCKETS,
        )
        self.latency = histogram("vllm:e2e_request_latency_seconds", "Time of a whole request.", _LATENCY_BUCKETS)
        self.recent_ttft, self.recent_tpot = RecentValues(), RecentValues()  # seconds
        self.registry.register(_EngineCollector(llm, model_name, waiting))

    def start(self, arrival: float) -> RequestTimes:
        """Return the recorder of one completion, whose request arrived then (`time.perf_counter`)."""
        return RequestTimes(self, arrival)

    def count_tokens(self, new: int) -> None:
        """Count generated tokens."""
        self._generation_tokens.inc(new)
        self.generated += new

    def count_end(self, reason: str) -> None:
        """Count a completion that has ended."""
        self._ended.labels(self._model, reason).inc()

    def count_response(self, status: int) -> None:
        """Count an HTTP response."""
        self._responses.labels(self._model, str(status)).inc()

    def render(self) -> bytes:
        """Return all metrics in the text format of Prometheus."""
        return generate_latest(self.registry)


class RecentValues:
    """Newest values of a quantity, each with its time."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float]] = deque(maxlen=_MAX_RECENT)  # time.monotonic, value

    def add(self, value: float) -> None:
        """Add a value."""
        self._values.append((time.monotonic(), value))

    def median(self) -> float | None:
        """Return the median of the last minute's newest values; None if there is none."""
        start = time.monotonic() - _RECENT_SECONDS
        recent = [value for added, value in self._values if added >= start]
        return median(recent) if recent else None


class RequestTimes:
    """Records times and tokens of one completion."""

    def __init__(self, metrics: Metrics, arrival: float) -> None:
        self._metrics = metrics
        self._arrival = arrival
        self._first: float | None = None  # when the first tokens came
        self._last = 0.0  # when the newest ones came
        self._first_tokens = 0  # that came with the first step
        self._tokens = 0

    def step(self, output: RequestOutput, *, first_of_prompt: bool) -> None:
        """Record a result; `first_of_prompt`: the prompt's tokens count with this completion."""
        now, new = time.perf_counter(), len(output.token_ids) - self._tokens
        if new <= 0:
            return
        if self._first is None:
            self._first, self._first_tokens = now, new
            self._metrics.ttft.observe(now - self._arrival)
            self._metrics.recent_ttft.add(now - self._arrival)
            if first_of_prompt:
                self._metrics.prompt_tokens.inc(len(output.prompt_token_ids))
            self._metrics.prefix_queries.inc(len(output.prompt_token_ids))
            self._metrics.prefix_hits.inc(output.stats.cached_tokens)
        else:
            self._metrics.step_tpot.observe((now - self._last) / new)
            self._metrics.recent_tpot.add((now - self._last) / new)
        self._metrics.count_tokens(new)
        self._last, self._tokens = now, self._tokens + new

    def end(self, output: RequestOutput | None) -> None:
        """Record the end of the completion; None or an unfinished result: it was aborted."""
        finished = output is not None and output.finished
        self._metrics.count_end(output.finish_reason if output is not None and finished else "abort")
        if finished:
            self._metrics.latency.observe(time.perf_counter() - self._arrival)
            if self._first is not None and (later := self._tokens - self._first_tokens):
                self._metrics.tpot.observe((self._last - self._first) / later)


class _EngineCollector:
    """Reads the engine's counters whenever metrics are asked for."""

    def __init__(self, llm: AsyncLLM, model_name: str, waiting: Callable[[], int]) -> None:
        self._llm = llm
        self._labels = (["model_name"], [model_name])
        self._waiting = waiting

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        engine = self._llm.llm.engine
        counters: Counters = engine.counters
        for name, field, text in _TOTALS:
            yield self._with_value(CounterMetricFamily(name, text, labels=self._labels[0]), getattr(counters, field))
        preempted = CounterMetricFamily(
            "vllm:num_preemptions", "Sequences that lost their place.", None, self._labels[0]
        )
        yield self._with_value(preempted, self._llm.llm.num_preemptions)
        mean = counters.drafted / counters.verified if counters.verified else 0.0
        cutoff = engine.prefetching.cutoff
        gauges = [
            ("vllm:num_requests_running", self._llm.load.running, "Requests that have begun."),
            ("vllm:num_requests_waiting", self._waiting(), "Requests that wait for their first step."),
            ("spmoe_expert_slots", engine.slots, "Expert slots."),
            ("spmoe_expert_slots_in_use", len(engine.experts.pool.slots_by_key()), "Expert slots that hold an expert."),
            ("spmoe_draft_tokens_mean", mean, "Mean number of draft tokens (K) of the steps that had a draft."),
        ]
        gauges.append(("spmoe_link_busy_ratio", engine.loop.rates.busy, "Share of recent steps that copies filled."))
        if (used := engine.target.kv_pool.usage) is not None:
            gauges.append(("vllm:kv_cache_usage_perc", used, "Share of the planned KV positions in use; 1 is all."))
        if cutoff is not None:  # the prefetch policy has one
            gauges.append(("spmoe_cutoff_layers", cutoff, "Layers that the draft stage prefetches for."))
        for name, value, text in gauges:
            yield self._with_value(GaugeMetricFamily(name, text, labels=self._labels[0]), value)

    def _with_value(self, family: CounterMetricFamily | GaugeMetricFamily, value: float) -> Metric:
        family.add_metric(self._labels[1], value)
        return family
