"""What a Prometheus server reads: requests by the names that vLLM's dashboards ask for, and the store by tier.

Histograms are filled as requests end. Everything else is read off engine and store when it is asked for.

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
from ca_jax.kv.rates import Rates
from ca_jax.server.answers import finish_reason
from ca_jax.storage.records import GAP_BOUNDS_S, GapHistogram, StoreStats
from ca_jax.telemetry.metrics import EngineMetrics
from ca_jax.turns.jobs import Job
from ca_jax.turns.requests import FinishReason

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
"""Of what `RequestMetrics.text` gives."""
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20)
_WHOLE_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


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


class RequestMetrics:
    """Metrics of one server, in a registry of its own.

    Args:
      model: its name, a label of all.
    """

    def __init__(self, model: str) -> None:
        self._registry = prometheus_client.CollectorRegistry()
        self._model = model

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> prometheus_client.Histogram:
            made = prometheus_client.Histogram(name, text, ["model_name"], buckets=buckets, registry=self._registry)
            return made.labels(model)

        self._ttft = histogram("vllm:time_to_first_token_seconds", "From a request to its first token.", _TTFT_S)
        self._tpot = histogram("vllm:inter_token_latency_seconds", "Between two tokens of an answer.", _TPOT_S)
        self._mean_tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time between tokens, by request.", _TPOT_S
        )
        self._whole = histogram("vllm:e2e_request_latency_seconds", "From a request to its last token.", _WHOLE_S)
        self._queued = histogram("vllm:request_queue_time_seconds", "That a request waited for a slot.", _WHOLE_S)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "Of a request's prefill.", _WHOLE_S)
        self._decode = histogram("vllm:request_decode_time_seconds", "From first token to last.", _WHOLE_S)
        self._prompt = histogram("vllm:request_prompt_tokens", "Tokens of a request's prompt.", _TOKENS)
        self._generated = histogram("vllm:request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._ended = prometheus_client.Counter(
            "vllm:request_success",
            "Answers that ended, by reason.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._refused = prometheus_client.Counter(
            "ca_jax:requests_refused", "Requests that were not served, by status.", ["status"], registry=self._registry
        )
        self._reader = _Reader(model)
        self._registry.register(self._reader)

    def add(self, job: Job) -> None:
        """Takes in a job that has ended; also one whose client went away or that was too late: an abort."""
        given_up = job.error is not None or job.finish_reason is FinishReason.CANCELLED
        self._ended.labels(self._model, "abort" if given_up else finish_reason(job.finish_reason)).inc()
        if not job.output_ids:
            return
        usage = job.usage()
        self._ttft.observe(usage.ttft_s)
        self._queued.observe(usage.queued_s)
        self._prefill.observe(usage.prefill_s)
        self._decode.observe(usage.decode_s)
        self._whole.observe(usage.ttft_s + usage.decode_s)
        self._prompt.observe(usage.prompt_tokens)
        self._generated.observe(usage.completion_tokens)
        times = usage.token_times_s
        for before, after in itertools.pairwise(times):
            self._tpot.observe(after - before)
        if len(times) > 1:
            self._mean_tpot.observe((times[-1] - times[0]) / (len(times) - 1))

    def refuse(self, status: int) -> None:
        """Counts a request that was not served."""
        self._refused.labels(str(status)).inc()

    def text(self, reading: Reading) -> bytes:
        """All metrics, as Prometheus reads them, with what engine and store said."""
        self._reader.reading = reading
        return prometheus_client.generate_latest(self._registry)


class _Reader(Collector):
    """What engine and store say, as metrics."""

    def __init__(self, model: str) -> None:
        self._model = model
        self.reading: Reading | None = None

    def collect(self) -> Iterator[Metric]:
        """All of them."""
        if self.reading is None:
            return
        age_s = time.monotonic() - self.reading.at_s
        yield GaugeMetricFamily("ca_jax:reading_age_seconds", "Since engine and store said what is told.", value=age_s)
        yield from self._of_engine(self.reading)
        yield from _of_store(self.reading.store)
        yield from _of_rates(self.reading)

    def _of_engine(self, reading: Reading) -> Iterator[Metric]:
        counted, model, store = reading.engine, self._model, reading.store
        dram_used = store.used_bytes / store.capacity_bytes if store.capacity_bytes else 0.0
        for name, text, value in (
            ("vllm:num_requests_running", "Answers that are being generated.", reading.num_running),
            ("vllm:num_requests_waiting", "Answers that wait for a slot.", reading.num_waiting),
            ("vllm:kv_cache_usage_perc", "Share of the decode slots' room that is taken.", reading.slots_used),
            ("vllm:cpu_cache_usage_perc", "Share of the store's DRAM that is taken.", dram_used),
        ):
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([model], value)
            yield gauge
        for name, text, value in (
            ("vllm:prompt_tokens", "Tokens of prompts.", counted.prompt_tokens),
            ("vllm:generation_tokens", "Tokens generated.", counted.completion_tokens),
            ("vllm:prefix_cache_queries", "Tokens of prompts that KV was looked up for.", counted.prompt_tokens),
            ("vllm:prefix_cache_hits", "Of those, tokens whose KV was loaded.", counted.cached_tokens),
        ):
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([model], value)
            yield counter
        for name, text in (
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
        ):
            yield CounterMetricFamily(f"ca_jax:{name}", text, value=getattr(counted, name))
        for name, text in (
            ("load_stall", "Seconds in which compute waited for a load."),
            ("write_stall", "Seconds in which compute waited for room in the write buffer."),
            ("prefill", "Seconds of prefills."),
            ("decode", "Seconds of decode steps."),
        ):
            yield CounterMetricFamily(f"ca_jax:{name}_seconds", text, value=getattr(counted, f"{name}_s"))


def _of_store(stats: StoreStats) -> Iterator[Metric]:
    ssd = stats.ssd
    tiers = [("dram", stats), *([] if ssd is None else [("ssd", ssd)])]
    sessions = GaugeMetricFamily(
        "ca_jax:tier_sessions", "Sessions in a tier; one in both counts in both.", labels=["tier"]
    )
    sessions.add_metric(["dram"], stats.num_dram_sessions)
    if ssd is not None:
        sessions.add_metric(["ssd"], ssd.num_sessions)
    yield sessions
    for name, text, field in (
        ("tier_capacity_bytes", "Bytes that a tier holds at most.", "capacity_bytes"),
        ("tier_used_bytes", "Bytes that a tier holds.", "used_bytes"),
    ):
        gauge = GaugeMetricFamily(f"ca_jax:{name}", text, labels=["tier"])
        for tier, sizes in tiers:
            gauge.add_metric([tier], getattr(sizes, field))
        yield gauge
    for name, text, field in (
        ("tier_evictions", "Sessions evicted from a tier.", "num_evictions"),
        ("tier_evicted_bytes", "Bytes of their blocks.", "evicted_bytes"),
    ):
        counter = CounterMetricFamily(f"ca_jax:{name}", text, labels=["tier"])
        for tier, sizes in tiers:
            counter.add_metric([tier], getattr(sizes, field))
        yield counter
    gaps = HistogramMetricFamily(
        "ca_jax:evict_to_reuse_seconds",
        "From a session's eviction from a tier until it was must be again.",
        labels=["tier"],
    )
    observed = [("dram", stats.evict_to_reuse), *([] if ssd is None else [("ssd", ssd.evict_to_reuse)])]
    for tier, each in observed:
        gaps.add_metric([tier], _buckets(each), each.sum_s)
    yield gaps
    hits = CounterMetricFamily("ca_jax:store_hits", "Loads that were completed, by where KV was.", labels=["tier"])
    hits.add_metric(["dram"], stats.num_hits - stats.num_hits_from_ssd)
    hits.add_metric(["ssd"], stats.num_hits_from_ssd)
    yield hits
    by_reason: list[tuple[str, str, Mapping[Any, int]]] = [
        ("store_misses", "Loads that served nothing, by reason.", stats.misses),
        ("skipped_saves", "Saves that did not begin, by reason.", stats.skipped_saves),
        *([] if ssd is None else [("failed_flushes", "Flushes that failed, by reason.", ssd.failed_flushes)]),
    ]
    for name, text, counts in by_reason:
        counter = CounterMetricFamily(f"ca_jax:{name}", text, labels=["reason"])
        for reason, count in counts.items():
            counter.add_metric([str(reason)], count)
        yield counter
    plain = [
        ("saves", "Saves that were published.", stats.num_saves),
        ("saved_bytes", "Bytes saved to DRAM.", stats.saved_bytes),
        ("loaded_bytes", "Bytes loaded from DRAM.", stats.loaded_bytes),
        ("expired_sessions", "Sessions whose time to live was over.", stats.num_expired),
    ]
    if ssd is not None:
        plain += [
            ("fetches", "Sessions fetched from SSD.", ssd.num_fetches),
            ("fetched_bytes", "Bytes fetched from SSD.", ssd.fetched_bytes),
            ("flushes", "Sessions written to SSD.", ssd.num_flushes),
            ("flushed_bytes", "Bytes written to SSD.", ssd.flushed_bytes),
        ]
    for name, text, value in plain:
        yield CounterMetricFamily(f"ca_jax:{name}", text, value=value)


def _buckets(gaps: GapHistogram) -> list[tuple[str, float]]:
    """As Prometheus counts: each bucket with all that are smaller."""
    bounds = [*map(str, GAP_BOUNDS_S), "+Inf"]
    return list(zip(bounds, itertools.accumulate(gaps.counts), strict=True))


def _of_rates(reading: Reading) -> Iterator[Metric]:
    if reading.rates is None:
        return
    gauge = GaugeMetricFamily("ca_jax:bytes_per_second", "How fast KV moves, as measured.", labels=["move"])
    for move in ("load", "save", "fetch"):
        line = getattr(reading.rates, move)
        if line is not None and math.isfinite(line.bytes_per_s):
            gauge.add_metric([move], line.bytes_per_s)
    yield gauge
