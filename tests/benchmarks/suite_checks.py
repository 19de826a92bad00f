"""What follows from what in the report of each suite."""

import collections
import math
from typing import Any

import numpy as np
import pytest

from benchmarks.replay.workload import Exchange
from ca_jax.config import EngineConfig
from ca_jax.storage.config import StoreConfig

Report = dict[str, Any]
TOKEN_BYTES = 3 * 2 * 2 * 16 * 4
"""Of the tiny model."""

ENGINE = EngineConfig(
    max_num_batched_tokens=64, max_batch_size=2, compile_cache_dir=None, store=StoreConfig(block_tokens=16)
)
"""What engines are that are small."""

QUOTIENTS = {
    "ttft": {"ratio_dram": ("ttft_dram_s", "compute_s"), "ratio_ssd": ("ttft_ssd_s", "compute_s")},
    "reuse": {"speedup": ("ttft_recompute_s", "ttft_reuse_s"), "load_share": ("load_s", "ttft_reuse_s")},
    "prefill": {"tokens_per_s": ("tokens", "prefill_s"), "ratio": ("tokens_per_s", "peer_tokens_per_s")},
    "decode": {
        "tokens_per_s_per_slot": ("tokens_per_s", "batch_size"),
        "speedup_vs_peer": ("tokens_per_s", "peer_tokens_per_s"),
    },
    "blend": {"speedup": ("ttft_recompute_s", "ttft_s"), "over_ideal": ("ttft_s", "ideal_s")},
    "overflow": {"hit_rate": ("hits", "history_turns"), "gap_ratio": ("gap_s", "tpot_s")},
    "preload": {"ratio": ("ttft_s", "ideal_s")},
    "serving": {"cached_share": ("cached_tokens", "prompt_tokens")},
    "store": {"ratio": ("gb_per_s", "plain_gb_per_s")},
}
"""By suite: fields that are one field over another, where there was one round."""


def hold_row(suite: str, row: dict[str, Any]) -> None:
    """Checks what holds in every row.

    Medians lie between the least and the largest sample, none of which is negative but a change; percentiles ascend;
    quotients are what they say.
    """
    for name, (least, largest) in row.get("spread", {}).items():
        assert least <= row[name] <= largest, name
        assert least >= 0 or name.endswith(("overhead", "gain")), name
    for name in row:
        if "p50" in name and row[name] is not None and not isinstance(row[name], dict):
            others = [row[other] for at in ("p95", "p99") if (other := name.replace("p50", at)) in row]
            assert 0 < row[name] <= min(others, default=math.inf), name
    for name, (over, under) in QUOTIENTS.get(suite, {}).items():
        if row.get(name) is not None:
            assert row[name] == pytest.approx(row[over] / row[under]), name


def hold_trace(suite: str, events: list[dict[str, Any]]) -> None:
    """Checks the spans of one more round: turns, and of each turn of `ttft` what every layer took."""
    events = [event for event in events if event["ph"] == "X"]
    if suite == "throughput":
        assert {"all turns, store", "all turns, recompute"} <= {event["name"] for event in events}
        return
    turns = [event for event in events if "tokens over" in event["name"]]
    assert [turn["name"] for turn in turns] == ["9 tokens over 150 from dram", "9 tokens over 150 from ssd_warm"]
    for turn, num_fetches in zip(turns, (0, 1), strict=True):
        begin, end = turn["ts"], turn["ts"] + turn["dur"]
        within = [event for event in events if begin <= event["ts"] and event["ts"] + event["dur"] <= end + 1]
        loads, computes = ([e["args"]["layer"] for e in within if e["cat"] == cat] for cat in ("load", "compute"))
        assert (sorted(loads), sorted(set(computes))) == ([0, 1, 2], [0, 1, 2])
        assert sum(event["cat"] == "fetch" for event in within) == num_fetches


MOVED: list[tuple[float, Any]] = []
"""What went over paced links, and at which pace."""


def check_ttft(report: Report) -> None:
    for row in report["rows"]:
        assert row["kv_bytes"] == row["history_tokens"] * TOKEN_BYTES
        assert 0 < row["fetch_ssd_s"] < row["ttft_ssd_s"]
        assert row["ratio_ideal"] == pytest.approx(row["ttft_dram_s"] / max(row["load_s"], row["compute_s"]))
    for name in ("ratio_dram", "ratio_ssd", "ratio_ideal"):
        assert report["summary"][name] == max(row[name] for row in report["rows"])


def check_prefill(report: Report) -> None:
    assert (report["peer"], report["rows"][0]["peer_prefill_s"]) == ("transformers", 1e-9)


def check_decode(report: Report) -> None:
    rows = report["rows"]
    for row in rows:
        assert row["peer_tokens_per_s"] == pytest.approx(row["batch_size"] * 2 / 1e-9)
    startup = report["startup"]
    assert min(startup["first_touch_s"], startup["engine_start_s"]) > 0
    (scaling,) = report["summary"]["batch_scaling"]
    ratio = rows[0]["tokens_per_s"] / rows[1]["tokens_per_s"]
    assert (scaling["batch_sizes"], scaling["ratio"]) == ([1, 3], pytest.approx(ratio))


def check_tiers(report: Report) -> None:
    (row,) = report["rows"]
    sources = row["sources"]
    assert {source: times["cached_tokens"] for source, times in sources.items()} == {
        **{"dram": {"dram": 150}, "recompute": {}},
        **{source: {"ssd": 150} for source in ("ssd_warm", "ssd", "ssd_restart")},
    }
    for source, times in sources.items():
        hold_row("tiers", times)
        assert times["speedup"] == pytest.approx(sources["recompute"]["ttft_s"] / times["ttft_s"])
        assert report["summary"].get(f"ttft_{source}_vs_recompute", 1.0) == times["speedup"]
    assert sources["recompute"]["load_s"] == 0 < sources["dram"]["load_s"]


def check_objects(report: Report) -> None:
    (row,) = report["rows"]
    assert row["claim_s"] < row["ttft_objects_s"]
    assert row["bookkeeping_s"] < row["publish_s"]
    assert row["ratio"] == pytest.approx(row["ttft_objects_s"] / row["ttft_ssd_s"])
    assert report["summary"]["ratio"] == row["ratio"]


def check_blend(report: Report) -> None:
    recompute, prefix, *rows = report["rows"]
    anew = {row["recompute_ratio"]: row["recomputed_tokens"] for row in rows}
    assert anew[0.0] == 0 < anew[0.6] < anew[1.0] == 80, "the first chunk is as it would be computed"
    for row in rows:
        assert row["same_token_share"] == 1 or row["recompute_ratio"] < 1
        assert row["ttft_recompute_s"] == recompute["ttft_s"]
        name = f"{row['recompute_ratio']:g}_{row['tier']}"
        assert report["summary"][f"speedup_{name}"] == row["speedup"]
        assert report["summary"][f"over_ideal_{name}"] == row["over_ideal"]
    assert (recompute["same_token_share"], prefix["same_token_share"], prefix["ideal_s"]) == (1, 1, None)


def check_blend_throughput(report: Report) -> None:
    rows = {row["mode"]: row for row in report["rows"]}
    for row in rows.values():
        assert row["speedup"] == pytest.approx(row["turns_per_s"] / rows["recompute"]["turns_per_s"])
        assert row["speedup_over_prefix"] == pytest.approx(row["turns_per_s"] / rows["prefix"]["turns_per_s"])
    assert (rows["recompute"]["hit_share"], rows["recompute"]["computed_share"]) == (0, 1)
    assert rows["reuse"]["hit_share"] > 0
    assert rows["reuse"]["computed_share"] < rows["blend"]["computed_share"] < 1
    assert report["summary"]["blend_over_prefix"] == rows["blend"]["speedup_over_prefix"]


def check_throughput(report: Report) -> None:
    store, recompute = report["rows"]
    assert store["prompt_tokens"] == recompute["prompt_tokens"] == recompute["prefill_tokens"]
    history_tokens = (store["prompt_tokens"] - store["prefill_tokens"]) / store["hit_share"]
    # All but the last token of the answer before, of two turns of each of three conversations.
    assert history_tokens - (store["prompt_tokens"] - store["prefill_tokens"]) == pytest.approx(6)
    assert recompute["hit_share"] == 0
    summary = report["summary"]
    assert summary["speedup"] == pytest.approx(store["turns_per_minute"] / recompute["turns_per_minute"])
    assert (summary["same_answer_share"], summary["conversations"]) == (1, "random")


def message(num_tokens: int) -> tuple[int, ...]:
    """The same tokens nowhere else."""
    return tuple(np.random.default_rng(num_tokens).integers(256, size=num_tokens).tolist())


OVERFLOWING = tuple(
    tuple(Exchange(message(size), 6) for size in sizes) for sizes in ([60, 50, 40, 20], [100, 25, 70], [30, 120])
)
"""Overflows by a message and in the middle of an answer, and by a message that leaves room for nothing else; the
second's second answer is to fill the window."""


def expected(*, recomputes: bool) -> dict[str, int]:
    """What a method should do, by arithmetic alone: tokens of a context, and how many of the first are stored."""
    found: collections.Counter[str] = collections.Counter()
    for script in OVERFLOWING:
        held = stored = 0
        for turn in script:
            found["history_turns"] += held > 0
            if held + len(turn.message) >= 128:
                found["overflows"] += 1
                stop = min(4 + 64, held)  # Of what leaves; the last token held may be among it.
                left = held - stop + 4
                fits = left + len(turn.message) + 1 <= 128
                stored = 4 + max(stored - stop, 0) if fits and not recomputes else 0
                held = left if fits else 0
            found["hits"] += stored > 4
            found["history_tokens"] += held
            found["loaded_tokens"] += stored
            found["prefill_tokens"] += held - stored + len(turn.message)
            held += len(turn.message) + turn.answer_tokens
            if held > 128:  # It was full before its last token was drawn.
                found["answer_overflows"] += 1
                found["overflows"] += 1
                held -= 64
                found["prefill_tokens"] += 128 - 1 - 64 if recomputes else 0
            stored = held - 1  # The last token was drawn and never run.
    assert found["overflows"] > found["answer_overflows"] > 0, "what is served has both"
    return dict(found)


def check_overflow(report: Report) -> None:
    rows, summary = report["rows"], report["summary"]
    ca, of = rows[:2]
    for row in (ca, of):
        wanted = expected(recomputes=row["method"] == "of")
        loaded_tokens = wanted.pop("loaded_tokens")
        assert {name: row[name] for name in wanted} == wanted
        assert row["loaded_share"] == pytest.approx(loaded_tokens / wanted["history_tokens"])
        assert row["metrics"]["truncations"] == row["overflows"]
        assert row["metrics"]["invalidated_histories"] == (row["overflows"] if row["method"] == "of" else 0)
        assert len(row["group_s"]) == 2, "of two conversations, and of one"
        assert row["total_s"] == sum(row["group_s"])
    assert ca["hit_rate"] > of["hit_rate"]
    compared = summary["of_over_ca"]
    assert compared["hit_rate_drop_points"] == 100 * (ca["hit_rate"] - of["hit_rate"])
    for name in ("total_s", "prefill_tokens", "prefill_s", "ttft_mean_s"):
        assert compared[name] == of[name] / ca[name]
    assert compared["total_s_of_groups"] == sorted(
        of_s / ca_s for of_s, ca_s in zip(of["group_s"], ca["group_s"], strict=True)
    )
    assert summary["same_turns"]
    assert summary["first_truncation_compiles"].keys() == {"ca", "of", "tt"}
    for row in rows[2:6]:
        assert (row["context_tokens"], row["dropped_tokens"]) == (128, 64)
        assert row["extra_steps"] == pytest.approx(row["gap_ratio"] - 1)
        assert row["extra_steps"] <= summary["extra_decode_steps"][row["method"]]
    next_turns = {(row["method"], row["overflowed"]): row for row in rows[6:21]}
    for (method, place), row in next_turns.items():
        is_prompt = place.endswith("prompt")
        left = 128 - 10 - 64 if is_prompt else 128 + 16 - 64 - 1
        anew = left if is_prompt and method != "ca" else 0
        assert (row["new_tokens"], row["prefill_tokens"] - 20) == (20, row["recomputed_tokens"])
        assert place == "nowhere" or (row["history_tokens"], row["recomputed_tokens"]) == (left, anew)
        assert row["ratio"] == pytest.approx(row["ttft_s"] / next_turns["ca", place]["ttft_s"])
    for row in rows[21:]:
        assert (row["blocks"], row["tokens"]) == (6, 6 * 128)
        assert row["kept_blocks"] == 4, "the first for its first tokens, half a one less, and three whole ones"
        assert 0 < row["discard_s"] <= row["discard_p99_s"]


def paces_of(direction: str) -> list[float]:
    """Those at which anything moved, in order and each once, but for the endless one."""
    assert {transfer.direction for _, transfer in MOVED} == {direction}
    return [pace for pace in dict.fromkeys(pace for pace, _ in MOVED) if pace < math.inf]


def check_preload(report: Report) -> None:
    turns = [row for row in report["rows"] if row["measured"] == "preload_turn"]
    paced_s = list(dict.fromkeys(row["load_s"] for row in turns if row["link"] == "paced"))
    assert [90 * TOKEN_BYTES / pace for pace in paces_of("load")] == pytest.approx(paced_s)
    for row in turns:
        assert row["head_start_s"] > 0
        if row["read_buffer"] == "recompute":
            assert (row["ideal_s"], row["ratio"], row["hidden"]) == (None, None, None)
        if row["read_buffer"] == "all":
            assert row["compute_s"] != row["ttft_s"], "it is held against an engine of its own"
    for row in report["rows"]:
        if row["measured"] == "read_buffer":
            assert 1 <= row["by_rates"] <= 3
            assert row["measured_best"] in (0, 1, 3)


def check_save(report: Report) -> None:
    *turns, stream = report["rows"]
    saved_s = [(40 + 4 - 1) * TOKEN_BYTES / pace for pace in paces_of("save")]
    assert saved_s == pytest.approx([row["save_s"] for row in turns if row["link"] == "paced"])
    for row in turns:
        assert row["async_overhead"] == pytest.approx(row["turn_async_s"] / row["turn_off_s"] - 1)
    assert stream["overhead"] == pytest.approx(stream["stream_on_s"] / stream["stream_off_s"] - 1)
    assert report["summary"]["store_overhead"] == stream["overhead"]


def check_serving(report: Report) -> None:
    assert report["summary"]["not_installed"] == []
    for row in report["rows"]:
        assert row["output_tokens_per_s"] == pytest.approx(row["turns_per_min"] / 60 * 4), "4 tokens an answer"
        assert 0 < row["tpot_p50_ms"] <= row["tpot_p99_ms"]
        assert 0 < row["cached_tokens"] < row["prompt_tokens"], "a second turn has a history, a first one has none"


def check_store(report: Report) -> None:
    summary = report["summary"]
    plain = {"dram_load": "np.copyto", "ssd_read_cold": "preadv", "ssd_read_warm": "preadv", "ssd_write": "pwritev"}
    rows = {(row["measured"], row["driver"]): row for row in report["rows"]}
    for (measured, driver), row in rows.items():
        assert row["gb_per_s"] > 0 <= row["cpu_s_per_gb"]
        if measured == "crc32c":
            assert summary["crc32c_cpu_s_per_gb"] == row["cpu_s_per_gb"]
            continue
        assert {way.split(",")[0] for way in row["plain_gb_per_s_of"]} == {plain[measured]}
        if driver:
            assert row["plain_gb_per_s"] == max(row["plain_gb_per_s_of"].values())
            beside = "plain" if measured == "ssd_write" else "preadv"
            assert summary[f"{'raw_' if driver == 'raw' else ''}{measured}_vs_{beside}"] == row["ratio"]
    faster = rows["ssd_write", "raw"]["gb_per_s"] / rows["ssd_write", "zarr3"]["gb_per_s"]
    assert summary["raw_vs_zarr3_ssd_write"] == faster
    assert summary["dram_vs_memcpy"] == rows["dram_load", None]["ratio"]


def check_policy(report: Report) -> None:
    kinds = ("decision", "startup", "prefix", "turn", "loop")
    decisions, (startup,), (prefix,), turns, loop = (
        [row for row in report["rows"] if row["measured"] == kind] for kind in kinds
    )
    assert [row["policy"] for row in decisions] == ["scheduler_aware", "return_aware", "lru", "fifo"]
    for row in (*decisions, prefix):
        assert row["num_sessions"] == 60
        assert row["p99_ms"] <= row["max_ms"]
    assert all(0 < row["fetches_per_plan"] <= 8 for row in decisions)
    assert 60 < startup["num_blocks"] <= 60 * 31
    assert startup["catalog_bytes"] > startup["num_blocks"] * 128 * 4, "token ids are in it"
    assert [(row["history_tokens"], row["new_tokens"]) for row in turns] == [(1_000, 100), (100_000, 100)]
    found = {(row["policy"], row["queue_depth"]): row for row in loop}
    depths = (("scheduler_aware", depth) for depth in (0.1, 0.25, 0.5, 0.75, 1.0))
    assert list(found) == [("belady", None), *depths, ("lru", 0.75), ("fifo", 0.75)]
    best = found["belady", None]["hit_rate"]
    for row in loop:
        assert row["over_capacity"] == pytest.approx(0.05)
        assert row["vs_belady"] == pytest.approx(row["hit_rate"] / best)
    # What is no measurement is the same everywhere: 40 of 42 fit, and who knows all jobs does as well as can be.
    assert best == pytest.approx(40 / 42, abs=0.03)
    assert found["scheduler_aware", 1.0]["vs_belady"] > 0.97
    summary = report["summary"]
    assert found["lru", 0.75]["hit_rate"] == summary["loop_lru"] == 0
    assert summary["loop_vs_belady"] == found["scheduler_aware", 0.75]["vs_belady"]
    assert summary["p99_ms"] == decisions[0]["p99_ms"]


CHECKS = {name.removeprefix("check_"): each for name, each in list(vars().items()) if name.startswith("check_")}
"""What else is so of the report of a suite, by its name."""
