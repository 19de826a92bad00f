"""What public load generators ask of a server, as they write it: guidellm 0.8 and aiperf 0.13, who are not here.

Not here: the generators themselves (`tools/load_generators.py` runs them).
"""

from __future__ import annotations

import dataclasses
import json
import math

import prometheus_client.parser
import pytest

from ca_jax.kv.rates import PrefillRate, Rates, TransferRate
from ca_jax.server.metrics import Reading
from tests import server_kit as sk
from tests.server_kit import assistant, user


@pytest.fixture(scope="module")
def server():
    with sk.running() as running:
        yield running


def guidellm_body(messages: list) -> dict:
    """Its `/v1/chat/completions`: text in parts, and what each turn took told with every chunk."""
    parts = [
        {**each, "content": [{"type": "text", "text": each["content"]}]} if each["role"] == "user" else each
        for each in messages
    ]
    return {
        "model": sk.MODEL,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "max_completion_tokens": 12,
        "ignore_eos": True,
        "messages": parts,
    }


def aiperf_body(messages: list) -> dict:
    """Its `chat` endpoint with `--extra-inputs ignore_eos:true --extra-inputs min_tokens:12`."""
    return {
        "messages": messages,
        "model": sk.MODEL,
        "stream": True,
        "max_completion_tokens": 12,
        "ignore_eos": True,
        "min_tokens": 12,
        "stream_options": {"include_usage": True},
    }


@pytest.mark.parametrize("make_body", [guidellm_body, aiperf_body])
def test_a_conversation_is_found_by_what_was_said(server, make_body):
    """Both send all of it with every turn, and concatenate what was streamed."""
    messages, length = [], 0
    with server.http() as http:
        for turn in range(3):
            messages.append(user(f"{make_body.__name__} says {turn} " + "and goes on " * 4))
            answer = http.post("/v1/chat/completions", json=make_body(messages))
            assert answer.status_code == 200, answer.text
            lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
            assert lines.pop() == "[DONE]"
            *pieces, last = [json.loads(line) for line in lines]
            assert all(piece["object"] == "chat.completion.chunk" for piece in pieces)
            text = "".join(piece["choices"][0]["delta"].get("content") or "" for piece in pieces)
            messages.append(assistant(text))
            usage = last["usage"]
            assert usage["completion_tokens"] == 12, "no stop token ends it"
            assert usage["prompt_tokens_details"]["cached_tokens"] >= max(length - 1, 0), "all but the last one's KV"
            length = usage["prompt_tokens"] + usage["completion_tokens"]


def test_what_is_asked_before_a_run(server):
    with server.http() as http:
        assert http.get("/health").status_code == 200
        assert http.head("/metrics").status_code == http.head("/health").status_code == 200
        assert not http.head("/metrics").content
        assert [model["id"] for model in http.get("/v1/models").json()["data"]] == [sk.MODEL]


def test_metrics_are_numbers_by_the_names_that_are_read(server):
    limitless = TransferRate(bytes_per_s=math.inf)  # As a few measurements of a fast link may say.
    prefill = PrefillRate(token_s=1e-3)
    rates = Rates(num_layers=2, layer_token_bytes=64, load=limitless, save=limitless, prefill=prefill)
    reading = dataclasses.replace(Reading.of(server.engine), rates=rates)
    with server.http() as http:
        served = http.get("/metrics").text
    for text in (served, server.service.metrics.text(reading).decode()):
        families = {family.name: family for family in prometheus_client.parser.text_string_to_metric_families(text)}
        wanted = {
            *("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:prompt_tokens", "vllm:generation_tokens"),
            *("vllm:prefix_cache_queries", "vllm:prefix_cache_hits", "vllm:kv_cache_usage_perc"),
            *("vllm:cpu_cache_usage_perc", "vllm:request_success", "vllm:time_to_first_token_seconds"),
        }
        assert wanted <= families.keys()
        for family in families.values():
            assert all(math.isfinite(sample.value) for sample in family.samples), family.name
        for name in ("vllm:kv_cache_usage_perc", "vllm:cpu_cache_usage_perc"):
            assert 0 <= families[name].samples[0].value <= 1
