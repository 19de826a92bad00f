"""What a Prometheus server reads: requests by the names that vLLM's dashboards ask for, and the store by tier.

Histograms are filled as requests end. Everything else is read off engine and store when it is asked for; a metric is a
row of the tables here.

Not here: counting itself (`ca_jax.telemetry.metrics`, `storage.records`), the route (`app`).
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import prometheus_client
from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ca_jax.engine import Engine
from ca_jax.kv.costs import Rates
from ca_jax.session import Job
from ca_jax.storage.records import GAP_BOUNDS_S, SsdStats, StoreStats, TierStats
from ca_jax.telemetry.metrics import EngineMetrics
from ca_jax.turns.requests import FinishReason, Usage

_Values = float | Mapping[Any, float]
CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
"""Of what `RequestMetrics.text` gives."""
_TTFT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10, 20)
_WHOLE_S = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


def _gaps(usage: Usage) -> list[float]:
    return [after - before for before, after in itertools.pairwise(usage.token_times_s)]


def _mean_gap(usage: Usage) -> list[float]:
    return [statistics.fmean(_gaps(usage))] if len(usage.token_times_s) > 1 else []


_HISTOGRAMS: tuple[tuple[str, str, tuple[float, ...], Callable[[Usage], list[float]]], ...] = (
    ("time_to_first_token_seconds", "From a request to its first token.", _TTFT_S, lambda each: [each.ttft_s]),
    ("inter_token_latency_seconds", "Between two tokens of an answer.", _TPOT_S, _gaps),
    ("request_time_per_output_token_seconds", "Mean time between tokens, by request.", _TPOT_S, _mean_gap),
    ("e2e_request_latency_seconds", "From a request to its last token.", _WHOLE_S, lambda e: [e.ttft_s + e.decode_s]),
    ("request_queue_time_seconds", "That a request waited for a slot.", _WHOLE_S, lambda each: [each.queued_s]),
    ("request_prefill_time_seconds", "Of a request's prefill.", _WHOLE_S, lambda each: [each.prefill_s]),
    ("request_decode_time_seconds", "From first token to last.", _WHOLE_S, lambda each: [each.decode_s]),
    ("request_prompt_tokens", "Tokens of a request's prompt.", _TOKENS, lambda each: [each.prompt_tokens]),
    ("request_generation_tokens", "Tokens of an answer.", _TOKENS, lambda each: [each.completion_tokens]),
)
_OTHERWISE = ("prompt_tokens", "cached_tokens", "completion_tokens")  # Fields of `EngineMetrics` by vLLM's names.
_STORE_COUNTERS = ("misses", "skipped_saves", "num_saves", "saved_bytes", "loaded_bytes", "num_expired")
_SSD_COUNTERS = ("failed_flushes", "num_fetches", "fetched_bytes", "num_flushes", "flushed_bytes")
_NAMES = {"misses": "store_misses", "num_expired": "expired_sessions"}  # Others are their fields', without `num_`.


class RequestMetrics(Collector):
    """Metrics of one server, in a registry of its own.

    Args:
      model: its name, a label of all.
    """

    def __init__(self, model: str) -> None:
        registry = self._registry = prometheus_client.CollectorRegistry()
        self._model = model
        self._histograms = []
        for name, text, bounds, values_of in _HISTOGRAMS:
            metric = Histogram(f"vllm:{name}", text, ["model_name"], buckets=bounds, registry=registry).labels(model)
            self._histograms.append((metric, values_of))
        labels = ["model_name", "finished_reason"]
        self._ended = Counter("vllm:request_success", "Answers that ended, by reason.", labels, registry=registry)
        text = "Requests that were not served, by status."
        self._refused = Counter("ca_jax:requests_refused", text, ["status"], registry=registry)
        self._read: list[Metric] = []  # What engine and store said,
        self._read_s = math.nan  # and when: seconds of a clock that only goes on.
        registry.register(self)

    def add(self, job: Job) -> None:
        """Takes in a job that has ended; also one whose client went away or that was too late: an abort."""
        given_up = job.error is not None or job.finish_reason is FinishReason.CANCELLED
        reason = "abort" if given_up or job.finish_reason is None else job.finish_reason.value
        self._ended.labels(self._model, reason).inc()
        if not job.output_ids:
            return
        usage = job.usage()
        for metric, values_of in self._histograms:
            for value in values_of(usage):
                metric.observe(value)

    def refuse(self, status: int) -> None:
        """Counts a request that was not served."""
        self._refused.labels(str(status)).inc()

    def read(self, engine: Engine) -> None:
        """Takes in what engine and store say now. For the engine's thread."""
        self._read = [*self._of_engine(engine), *_of_store(engine.store_stats()), *_of_rates(engine.rates)]
        self._read_s = time.monotonic()

    def text(self) -> bytes:
        """All metrics, as Prometheus reads them, with what engine and store said last."""
        return prometheus_client.generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What engine and store said last, and how long ago that is."""
        if self._read:
            age_s = time.monotonic() - self._read_s
            yield _gauge("ca_jax:reading_age_seconds", "Since engine and store said what is told.", age_s)
        yield from self._read

    def _of_engine(self, engine: Engine) -> Iterator[Metric]:
        (running, waiting), counted, store = engine.jobs, engine.metrics, engine.store_stats()
        dram_used = store.used_bytes / store.capacity_bytes if store.capacity_bytes else 0.0
        pages_used = "Share of the devices' pages of KV that running answers hold."
        for make, name, text, value in (
            (_gauge, "num_requests_running", "Answers that are being generated.", len(running)),
            (_gauge, "num_requests_waiting", "Answers that wait for a slot.", len(waiting)),
            (_gauge, "kv_cache_usage_perc", pages_used, engine.stored.busy_pages_share),
            (_gauge, "cpu_cache_usage_perc", "Share of the store's DRAM that is taken.", dram_used),
            (_counter, "prompt_tokens", "Tokens of prompts.", counted.prompt_tokens),
            (_counter, "generation_tokens", "Tokens generated.", counted.completion_tokens),
            (_counter, "prefix_cache_queries", "Tokens of prompts that KV was looked up for.", counted.prompt_tokens),
            (_counter, "prefix_cache_hits", "Of those, tokens whose KV was loaded.", counted.cached_tokens),
        ):
            yield make(f"vllm:{name}", text, {self._model: value}, "model_name")
        for field, text in _docs(EngineMetrics).items():
            count = getattr(counted, field)
            if isinstance(count, int | float) and field not in _OTHERWISE:
                yield _counter(f"ca_jax:{re.sub('_s$', '_seconds', field)}", text, count)


def _of_rates(rates: Rates | None) -> Iterator[Metric]:
    lines = {move: getattr(rates, move, None) for move in ("load", "save", "fetch")}
    known = {move: line.bytes_per_s for move, line in lines.items() if line and math.isfinite(line.bytes_per_s)}
    if rates is not None:
        yield _gauge("ca_jax:bytes_per_second", "How fast KV moves, as measured.", known, "move")


def tiers_of(stats: StoreStats) -> list[tuple[str, TierStats, int, int]]:
    """Each tier's name, what it says, sessions in it, and loads of KV that had been there."""
    dram = ("dram", stats, stats.num_dram_sessions, stats.num_hits - stats.num_hits_from_ssd)
    ssd = stats.ssd
    return [dram] if ssd is None else [dram, ("ssd", ssd, ssd.num_sessions, stats.num_hits_from_ssd)]


def _of_store(stats: StoreStats) -> Iterator[Metric]:
    tiers, docs = tiers_of(stats), _docs(TierStats)
    sessions, hits = {name: number for name, _, number, _ in tiers}, {name: number for name, _, _, number in tiers}
    yield _gauge("ca_jax:tier_sessions", "Sessions in a tier; one in both counts in both.", sessions, "tier")
    yield _counter("ca_jax:store_hits", "Loads that were completed, by where KV was.", hits, "tier")
    for name in ("capacity_bytes", "used_bytes", "num_evictions", "evicted_bytes"):
        make, by_tier = (
            _counter if "evict" in name else _gauge,
            {tier: getattr(each, name) for tier, each, _, _ in tiers},
        )
        yield make(f"ca_jax:tier_{name.removeprefix('num_')}", docs[name], by_tier, "tier")
    gaps = HistogramMetricFamily("ca_jax:evict_to_reuse_seconds", docs["evict_to_reuse"], labels=["tier"])
    for tier, each, _, _ in tiers:  # Each bucket counts with all that are smaller.
        cumulative = itertools.accumulate(each.evict_to_reuse.counts)
        buckets = list(zip([*map(str, GAP_BOUNDS_S), "+Inf"], cumulative, strict=True))
        gaps.add_metric([tier], buckets, each.evict_to_reuse.sum_s)
    yield gaps
    counters: list[tuple[TierStats, dict[str, str], tuple[str, ...]]] = [(stats, _docs(StoreStats), _STORE_COUNTERS)]
    if stats.ssd is not None:
        counters.append((stats.ssd, _docs(SsdStats), _SSD_COUNTERS))
    for counted, told, fields in counters:
        for field in fields:
            name = _NAMES.get(field, field.removeprefix("num_"))
            yield _counter(f"ca_jax:{name}", told[field], getattr(counted, field), "reason")


@functools.cache
def _docs(kind: type) -> dict[str, str]:
    """The docstring under each field of a dataclass."""
    found = re.findall(r'^    (\w+): .*\n    """([^"]*)"""', inspect.getsource(kind), re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def _filled(
    kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, values: _Values, label: str = ""
) -> Metric:
    """A metric with a value, or with values by that of its one label."""
    by_label = isinstance(values, Mapping)
    family = kind(name, text, labels=[label] if by_label else [])
    for of_label, value in values.items() if isinstance(values, Mapping) else (("", values),):
        family.add_metric([str(of_label)] if by_label else [], value)
    return family


_gauge, _counter = (functools.partial(_filled, kind) for kind in (GaugeMetricFamily, CounterMetricFamily))
