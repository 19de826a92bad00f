"""What a Prometheus server reads: requests by the names that vLLM's dashboards ask for, and the store by tier.

Histograms are filled as requests end. Everything else is read off engine and store when it is asked for; a metric is a
row of the tables here.

Not here: counting itself (`ca_jax.telemetry.metrics`, `storage.records`), the route (`app`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ca_jax.engine import Engine
from ca_jax.kv.costs import Rates
from ca_jax.server.answers import finish_reason
from ca_jax.session import Job
from ca_jax.storage.records import GAP_BOUNDS_S, SsdStats, StoreStats
from ca_jax.telemetry.metrics import EngineMetrics
from ca_jax.turns.requests import FinishReason

_Values = float | Mapping[Any, float]
CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
"""Of what `RequestMetrics.text` gives."""
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20)
_WHOLE_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_HISTOGRAMS: tuple[tuple[str, str, tuple[float, ...]], ...] = (
    ("time_to_first_token_seconds", "From a request to its first token.", _TTFT_S),
    ("inter_token_latency_seconds", "Between two tokens of an answer.", _TPOT_S),
    ("request_time_per_output_token_seconds", "Mean time between tokens, by request.", _TPOT_S),
    ("e2e_request_latency_seconds", "From a request to its last token.", _WHOLE_S),
    ("request_queue_time_seconds", "That a request waited for a slot.", _WHOLE_S),
    ("request_prefill_time_seconds", "Of a request's prefill.", _WHOLE_S),
    ("request_decode_time_seconds", "From first token to last.", _WHOLE_S),
    ("request_prompt_tokens", "Tokens of a request's prompt.", _TOKENS),
    ("request_generation_tokens", "Tokens of an answer.", _TOKENS),
)
_ENGINE_COUNTERS = (  # By fields of `EngineMetrics`, whose times end in `_s`.
    ("turns", "Turns that ended well."),
    ("cancelled", "Turns that were given up."),
    ("loaded_histories", "Turns whose stored history was loaded whole."),
    ("mixed_histories", "Turns whose stored history was loaded in part and recomputed behind that."),
    ("recomputed_histories", "Turns whose stored history was recomputed, predicted to be faster."),
    ("truncations", "Times tokens left a conversation whose context was full."),
    ("dropped_tokens", "Tokens that left then."),
    ("blended_turns", "Turns whose context was made of stored chunks."),
    ("computed_chunks", "Chunks that were computed alone, to be stored."),
    ("loaded_chunks", "Chunks of contexts whose stored KV was loaded."),
    ("missed_chunks", "Chunks of contexts of which nothing was stored."),
    ("failed_loads", "Loads that broke and were recomputed."),
    ("failed_saves", "Saves that broke and were given up."),
    ("refused_notes", "States of conversations that the log of notes did not take."),
    ("load_stall_seconds", "Seconds in which compute waited for a load."),
    ("write_stall_seconds", "Seconds in which compute waited for room in the write buffer."),
    ("prefill_seconds", "Seconds of prefills."),
    ("decode_seconds", "Seconds of decode steps."),
)


@dataclasses.dataclass(frozen=True)
class Reading:
    """What engine and store say at one moment."""

    engine: EngineMetrics
    store: StoreStats
    rates: Rates | None
    num_running: int
    num_waiting: int
    slots_used: float
    """Share of the decode slots' room for tokens that is taken."""
    at_s: float = dataclasses.field(default_factory=time.monotonic)
    """When; seconds of a clock that only goes on."""

    @classmethod
    def of(cls, engine: Engine) -> Reading:
        """For the engine's thread."""
        running, waiting = engine.jobs
        room = engine.config.max_batch_size * engine.window
        return cls(
            engine=dataclasses.replace(engine.metrics),
            store=engine.store_stats(),
            rates=engine.rates,
            num_running=len(running),
            num_waiting=len(waiting),
            slots_used=sum(job.num_tokens for job in running) / room,
        )


class RequestMetrics(Collector):
    """Metrics of one server, in a registry of its own.

    Args:
      model: its name, a label of all.
    """

    def __init__(self, model: str) -> None:
        registry = self._registry = prometheus_client.CollectorRegistry()
        self._model = model
        self._histograms = {
            name: prometheus_client.Histogram(
                f"vllm:{name}", text, ["model_name"], buckets=bounds, registry=registry
            ).labels(model)
            for name, text, bounds in _HISTOGRAMS
        }
        labels = ["model_name", "finished_reason"]
        self._ended = prometheus_client.Counter(
            "vllm:request_success", "Answers that ended, by reason.", labels, registry=registry
        )
        self._refused = prometheus_client.Counter(
            "ca_jax:requests_refused", "Requests that were not served, by status.", ["status"], registry=registry
        )
        self._reading: Reading | None = None  # None: there is nothing to collect yet.
        registry.register(self)

    def add(self, job: Job) -> None:
        """Takes in a job that has ended; also one whose client went away or that was too late: an abort."""
        given_up = job.error is not None or job.finish_reason is FinishReason.CANCELLED
        self._ended.labels(self._model, "abort" if given_up else finish_reason(job.finish_reason)).inc()
        if not job.output_ids:
            return
        usage = job.usage()
        observed = {
            "time_to_first_token_seconds": usage.ttft_s,
            "request_queue_time_seconds": usage.queued_s,
            "request_prefill_time_seconds": usage.prefill_s,
            "request_decode_time_seconds": usage.decode_s,
            "e2e_request_latency_seconds": usage.ttft_s + usage.decode_s,
            "request_prompt_tokens": usage.prompt_tokens,
            "request_generation_tokens": usage.completion_tokens,
        }
        times = usage.token_times_s
        if len(times) > 1:
            observed["request_time_per_output_token_seconds"] = (times[-1] - times[0]) / (len(times) - 1)
        for name, value in observed.items():
            self._histograms[name].observe(value)
        for before, after in itertools.pairwise(times):
            self._histograms["inter_token_latency_seconds"].observe(after - before)

    def refuse(self, status: int) -> None:
        """Counts a request that was not served."""
        self._refused.labels(str(status)).inc()

    def text(self, reading: Reading) -> bytes:
        """All metrics, as Prometheus reads them, with what engine and store said."""
        self._reading = reading
        return prometheus_client.generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What engine and store say, as metrics."""
        reading = self._reading
        if reading is None:
            return
        age_s = time.monotonic() - reading.at_s
        yield _gauge("ca_jax:reading_age_seconds", "Since engine and store said what is told.", age_s)
        yield from self._of_engine(reading)
        yield from _of_store(reading.store)
        if reading.rates is not None:
            lines = [(move, getattr(reading.rates, move)) for move in ("load", "save", "fetch")]
            known = {move: line.bytes_per_s for move, line in lines if line and math.isfinite(line.bytes_per_s)}
            yield _gauge("ca_jax:bytes_per_second", "How fast KV moves, as measured.", known, "move")

    def _of_engine(self, reading: Reading) -> Iterator[Metric]:
        counted, store = reading.engine, reading.store
        dram_used = store.used_bytes / store.capacity_bytes if store.capacity_bytes else 0.0
        for name, text, value in (
            ("vllm:num_requests_running", "Answers that are being generated.", reading.num_running),
            ("vllm:num_requests_waiting", "Answers that wait for a slot.", reading.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of the decode slots' room that is taken.", reading.slots_used),
            ("vllm:cpu_cache_usage_perc", "Share of the store's DRAM that is taken.", dram_used),
        ):
            yield _gauge(name, text, {self._model: value}, "model_name")
        for name, text, count in (
            ("vllm:prompt_tokens", "Tokens of prompts.", counted.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", counted.completion_tokens),
            ("vllm:prefix_cache_queries", "Tokens of prompts that KV was looked up for.", counted.prompt_tokens),
            ("vllm:prefix_cache_hits", "Of those, tokens whose KV was loaded.", counted.cached_tokens),
        ):
            yield _counter(name, text, {self._model: count}, "model_name")
        for name, text in _ENGINE_COUNTERS:
            yield _counter(f"ca_jax:{name}", text, getattr(counted, name.replace("_seconds", "_s")))


def _of_store(stats: StoreStats) -> Iterator[Metric]:
    ssd = stats.ssd
    tiers: dict[str, StoreStats | SsdStats] = {"dram": stats} if ssd is None else {"dram": stats, "ssd": ssd}
    sessions = {"dram": stats.num_dram_sessions} | ({} if ssd is None else {"ssd": ssd.num_sessions})
    yield _gauge("ca_jax:tier_sessions", "Sessions in a tier; one in both counts in both.", sessions, "tier")
    for make, name, text, field in (
        (_gauge, "tier_capacity_bytes", "Bytes that a tier holds at most.", "capacity_bytes"),
        (_gauge, "tier_used_bytes", "Bytes that a tier holds.", "used_bytes"),
        (_counter, "tier_evictions", "Sessions evicted from a tier.", "num_evictions"),
        (_counter, "tier_evicted_bytes", "Bytes of their blocks.", "evicted_bytes"),
    ):
        yield make(f"ca_jax:{name}", text, {tier: getattr(each, field) for tier, each in tiers.items()}, "tier")
    text = "From a session's eviction from a tier until it was needed again."
    gaps = HistogramMetricFamily("ca_jax:evict_to_reuse_seconds", text, labels=["tier"])
    for tier, each in tiers.items():  # Each bucket counts with all that are smaller.
        cumulative = itertools.accumulate(each.evict_to_reuse.counts)
        buckets = list(zip([*map(str, GAP_BOUNDS_S), "+Inf"], cumulative, strict=True))
        gaps.add_metric([tier], buckets, each.evict_to_reuse.sum_s)
    yield gaps
    hits = {"dram": stats.num_hits - stats.num_hits_from_ssd, "ssd": stats.num_hits_from_ssd}
    yield _counter("ca_jax:store_hits", "Loads that were completed, by where KV was.", hits, "tier")
    yield _counter("ca_jax:store_misses", "Loads that served nothing, by reason.", stats.misses, "reason")
    yield _counter("ca_jax:skipped_saves", "Saves that did not begin, by reason.", stats.skipped_saves, "reason")
    yield _counter("ca_jax:saves", "Saves that were published.", stats.num_saves)
    yield _counter("ca_jax:saved_bytes", "Bytes saved to DRAM.", stats.saved_bytes)
    yield _counter("ca_jax:loaded_bytes", "Bytes loaded from DRAM.", stats.loaded_bytes)
    yield _counter("ca_jax:expired_sessions", "Sessions whose time to live was over.", stats.num_expired)
    if ssd is not None:
        yield _counter("ca_jax:failed_flushes", "Flushes that failed, by reason.", ssd.failed_flushes, "reason")
        yield _counter("ca_jax:fetches", "Sessions fetched from SSD.", ssd.num_fetches)
        yield _counter("ca_jax:fetched_bytes", "Bytes fetched from SSD.", ssd.fetched_bytes)
        yield _counter("ca_jax:flushes", "Sessions written to SSD.", ssd.num_flushes)
        yield _counter("ca_jax:flushed_bytes", "Bytes written to SSD.", ssd.flushed_bytes)


def _gauge(name: str, text: str, values: _Values, label: str | None = None) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=[label] if label else []), values)


def _counter(name: str, text: str, values: _Values, label: str | None = None) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=[label] if label else []), values)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, values: _Values) -> Metric:
    """With a value, or with values by that of its one label."""
    if isinstance(values, Mapping):
        for of_label, value in values.items():
            family.add_metric([str(of_label)], value)
    else:
        family.add_metric([], values)
    return family
