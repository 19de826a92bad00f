"""Flags made from configs and configs made from flags: every field, of every script, however they are spelled."""

import ast
import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
from absl import flags

import benchmarks.suites
from benchmarks import demo
from benchmarks import flags as bench_flags
from benchmarks.evaluate import main as evaluate
from benchmarks.evaluate.comparison import Comparison
from benchmarks.evaluate.mmlu import MmluConfig
from benchmarks.evaluate.rag import GateConfig
from benchmarks.evaluate.rag_methods import Blends
from benchmarks.evaluate.stream import ComparedOverflow
from benchmarks.harness import SUITES
from benchmarks.overflow_rows import OverflowBenchConfig
from benchmarks.replay import main as replay
from ca_jax.config import BlendConfig, EngineConfig
from ca_jax.launch.flags import NAMES, ConfigFlags, field_docs, help_of, out_path, refuse, spelled
from ca_jax.overflow.config import OverflowConfig
from ca_jax.server.config import ServerConfig
from ca_jax.storage.config import StoreConfig
from ca_jax.turns.requests import SamplingParams
from tests.scripts_kit import run_script

benchmarks.suites.load()

WITHOUT_FLAG = {"save_group_tokens", "compile_cache_dir", "ssd_deadline_s", "block_tokens"}
CHANGED = {
    EngineConfig(): "max_batch_size=3 max_num_batched_tokens=128 max_draft_tokens=3 page_tokens=64 "
    "draft_model=smollm2-135m-instruct "
    "kv_pool_gib=0.5 keep_pages=False queue_order=arrival "
    "max_tpot_ms=12.5 read_buffer=15 read_buffer_gib=0.25 write_buffer_gib=0.0 async_save=False "
    "recompute_if_faster=False dtype=bfloat16 weight_dtype=int8 kv_rest_dtype=int8 context_window=512 "
    "special_tokens_in_content=True "
    "tensor_parallel_size=2 data_parallel_size=3 share_prefixes=False max_adapters=2 max_adapter_rank=8",
    OverflowConfig(): "method=tt truncation_ratio=0.75 keep_first_tokens=1 anchor_tokens=16 repair_ratio=0.15 "
    "repair=none drift=drift.npz whole_turns=True discarder=oldest",
    BlendConfig(): "mode=prefix recompute_ratio=0.25 min_recompute_ratio=0.0 check_layers=4 selection=hkvd "
    "chunk_head=none",
    StoreConfig(): "dram_gib=1.5 dram_free_fraction=0.25 ssd_dir=/kv ssd_gib=3.0 ssd_free_floor_gib=0.0 "
    "ssd_driver=zarr3 ssd_url=memory://kv ssd_codec=codec.npz eviction_policy=fifo ttl_s=90.0 tenant_quota_gib=0.125 "
    "objects_url=memory://shared objects_write=idle objects_deadline_s=2.5 "
    "objects_codec=codec.npz "
    "tenant_quotas=(('a=b',1),('bob',5000))",
    ServerConfig(): "served_model_name=mine max_queue=5 request_timeout_s=1.5 shutdown_grace_s=2.0 max_body_bytes=9 "
    "max_choices=2 max_chunks=3 max_chunk_tokens=77 max_lookups=4 max_open_sessions=6 max_step_s=8.0 "
    "strict_fields=True access_log=- otlp_traces_endpoint=http://127.0.0.1:4318 "
    "kv_events_url=tcp://127.0.0.1:5557 kv_events_replay_url=tcp://127.0.0.1:5558 kv_events_topic=kv "
    "allowed_hosts=('a.example','b.example') tool_call_parser=hermes reasoning_parser=think",
}
"""A value of each field of a config, as Python spells it or as text."""
KINDS = [type(default).__name__ for default in CHANGED]
SCRIPTS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "bench": (
        lambda values: bench_flags.define(flag_values=values),
        lambda values: bench_flags.config(values["suite"].value, flag_values=values),
    ),
    "evaluate": (evaluate.define_flags, evaluate.read_config),
    "replay": (replay.define_flags, replay._CONFIG.read),
    "demo": (demo._FLAGS.define, demo._FLAGS.read),
}
"""Of scripts that make one config of their flags: how flags are defined, and how the config is read."""


def parse(default, *arguments, **options):
    values, made = flags.FlagValues(), ConfigFlags(default, **options)
    made.define(values)
    values(["program", *arguments])
    return made.read(values)


def config_of(script, *arguments):
    define, read = SCRIPTS[script]
    values = flags.FlagValues()
    define(values)
    if "json_out" in values and "--task=blend_gate" not in arguments and "--json_out=" not in arguments:
        arguments = ("--json_out=out.json", *arguments)
    values(["program", *(each for each in arguments if each != "--json_out=")])
    return read(values)


def argument(kind, field, value):
    """A flag as a user types it, once or more often."""
    name = NAMES.get(kind, {}).get(field, field)
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no{name}"]
    if field == "tenant_quotas":
        return [f"--{name}={tenant}={num_bytes}" for tenant, num_bytes in value]
    return [f"--{name}={','.join(value) if isinstance(value, tuple) else value}"]


def values_of(text):
    """The values of a line of the table, by field."""

    def value(said):
        try:
            return ast.literal_eval(said)
        except (SyntaxError, ValueError):
            return said

    return {name: value(said) for name, said in (each.split("=", 1) for each in text.split())}


def own_fields(kind):
    return {field.name for field in dataclasses.fields(kind)} - WITHOUT_FLAG - {"overflow", "blend", "store"}


# Configs of the engine and the server.


@pytest.mark.parametrize(("default", "changed"), CHANGED.items(), ids=KINDS)
def test_every_field_has_a_flag_with_the_field_s_words_and_value(default, changed):
    kind, changed = type(default), values_of(changed)
    assert changed.keys() == own_fields(kind), "the table above has every field"
    values = flags.FlagValues()
    ConfigFlags(default).define(values)
    for field in changed:
        flag = values[NAMES.get(kind, {}).get(field, field)]
        assert flag.value == (list(getattr(default, field)) if flag.value == [] else getattr(default, field))
        if field not in ("discarder", "tenant_quotas"):
            first_words = re.split("[,.;]", field_docs(kind)[field])[0].replace("`", "")
            assert first_words in flag.help
    assert parse(default) == default
    all_given = [each for field, value in changed.items() for each in argument(kind, field, value)]
    assert parse(default, *all_given) == dataclasses.replace(default, **changed)
    assert parse(dataclasses.replace(default, **changed)) == dataclasses.replace(default, **changed)


def test_configs_in_a_config_have_flags_too():
    arguments = ("--overflow_method=tt", "--blend_mode=reuse", "--dram_gib=1", "--read_buffer=all")
    assert parse(EngineConfig(), *arguments) == EngineConfig(
        read_buffer="all",
        overflow=OverflowConfig(method="tt"),
        blend=BlendConfig(mode="reuse"),
        store=StoreConfig(dram_gib=1.0),
    )
    default = EngineConfig(max_tpot_ms=40.0, save_group_tokens=8, blend=BlendConfig(mode="prefix"))
    assert parse(default, "--blend_check_layers=2") == dataclasses.replace(
        default, blend=BlendConfig(mode="prefix", check_layers=2)
    )


def test_what_has_no_flag_is_as_in_the_default():
    default = EngineConfig(overflow=OverflowConfig(method="of"), store=StoreConfig(dram_gib=0.5))
    options = {"without": ("overflow_method", "truncate_whole_turns", "store")}
    found = parse(default, "--truncation_ratio=0.25", **options)
    assert found == dataclasses.replace(default, overflow=OverflowConfig(method="of", truncation_ratio=0.25))
    for name in ("overflow_method=tt", "truncate_whole_turns", "dram_gib=1"):
        with pytest.raises(flags.UnrecognizedFlagError, match=name.partition("=")[0]):
            parse(default, f"--{name}", **options)
    only = parse(SamplingParams(max_tokens=7), "--top_k=3", only=("top_k",))
    assert only == SamplingParams(max_tokens=7, top_k=3)
    directory = parse(StoreConfig(), "--ssd_dir=~/kv").ssd_dir
    assert directory.endswith("/kv")
    assert "~" not in directory


def test_an_engine_may_drop_nothing():
    assert parse(EngineConfig(), "--overflow_method=off") == EngineConfig(overflow=None)
    dropping_nothing = EngineConfig(overflow=None, max_batch_size=2)
    assert parse(dropping_nothing) == dropping_nothing
    assert parse(dropping_nothing, "--overflow_method=ca") == EngineConfig(max_batch_size=2)
    for given in ("--keep_first_tokens=1", "--truncate_whole_turns"):
        with pytest.raises(ValueError, match="must be left out where overflow_method is off"):
            parse(EngineConfig(), "--overflow_method=off", given)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ("--read_buffer=some", "read_buffer"),
        ("--overflow_method=none", "overflow_method.*value should be one of"),
        ("--max_batch_size=0", "max_batch_size"),
        ("--overflow_anchor_tokens=-1", "anchor_tokens"),
        ("--blend_recompute_ratio=1.5", "recompute_ratio"),
        ("--dram_gib=-1", "dram_gib"),
        ("--tenant_quotas=bob", "tenant_quotas must be TENANT=BYTES, got 'bob'"),
    ],
)
def test_what_a_config_refuses_is_said_with_the_name_of_the_flag(given, named):
    with pytest.raises((ValueError, flags.IllegalFlagValueError), match=named):
        parse(EngineConfig(), given)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (["--max-batch-size=3"], ["--max_batch_size=3"]),
        (["--max-batch-size", "3"], ["--max_batch_size", "3"]),
        (["--max-num-seqs=3", "--max_model_len=9"], ["--max_batch_size=3", "--context_window=9"]),
        (["--no-async-save", "--noasync-save"], ["--noasync_save", "--noasync_save"]),
        (["--async-save", "a-b", "--ssd_dir=a-b", "-1"], ["--async_save", "a-b", "--ssd_dir=a-b", "-1"]),
        (["--unknown-flag", "--", "--max-batch-size"], ["--unknown-flag", "--", "--max-batch-size"]),
    ],
)
def test_dashes_and_other_servers_names_do_as_well(typed, meant):
    values = flags.FlagValues()
    ConfigFlags(EngineConfig()).define(values)
    assert spelled(["program", *typed], values) == ["program", *meant]


def test_flags_that_would_be_ignored_and_files_that_are_directories_are_refused(tmp_path):
    values = flags.FlagValues()
    flags.DEFINE_string("json_out", None, "A file.", flag_values=values)
    values(["program"])
    refuse(("json_out", "undefined"), "it", values)
    assert out_path("json_out", values) is None
    values(["program", f"--json_out={tmp_path}"])
    with pytest.raises(ValueError, match="--json_out must be left out of it, which does not read it"):
        refuse(("json_out",), "it", values)
    with pytest.raises(ValueError, match="json_out must be a file, got the directory"):
        out_path("json_out", values)


# Scripts.


@pytest.mark.parametrize("cases", [bench_flags.suite_flags(), evaluate._CASES], ids=["bench", "evaluate"])
def test_every_field_of_every_suite_and_task_is_a_flag_whose_help_is_its_docstring(cases):
    values = flags.FlagValues()
    cases.define(values)
    for case, kinds in cases.kinds.items():
        for kind in kinds:
            for field in dataclasses.fields(kind):
                if field.name not in cases.without:
                    assert cases.fields[field.name][case][0] is kind
                    assert help_of(kind, field.name) in values[field.name].help, field.name
                    assert values[field.name].default is None, "it may differ from case to case"


@pytest.mark.parametrize("suite", SUITES)
def test_without_flags_every_suite_has_its_own_defaults(suite):
    assert config_of("bench", f"--suite={suite}") == SUITES[suite].config()


def typed(values):
    """Values of fields as flags of their names."""
    return " ".join(
        f"--{name}={','.join(map(str, each)) if type(each) is tuple else each}" for name, each in values.items()
    )


METHODS_OF = {"truncation_ratio": 0.25, "keep_first_tokens": 0, "anchor_tokens": 4, "repair_ratio": 0.1}
MMLU = {"data": "dev", "max_tokens": 700, "num_shots": 0, "max_items": 3, "preamble": "a.txt", "seed": 7}
BLENDS = {"ratios": (0.1, 0.2), "selections": ("hkvd",), "check_layers": 2}
FIELDS = [
    (
        "bench --suite=overflow --overflow_methods=ca,tt --gap_methods= --truncation_ratio=0.25 --keep_first_tokens=8",
        OverflowBenchConfig(
            overflow_methods=("ca", "tt"),
            gap_methods=(),
            engine=EngineConfig(overflow=OverflowConfig(truncation_ratio=0.25, keep_first_tokens=8)),
        ),
    ),
    (
        f"evaluate --task=mmlu --method=of,ca --window=512 --step_tokens=64 {typed(MMLU)} --truncation_ratio=0.25 "
        "--keep_first_tokens=0 --overflow_anchor_tokens=4 --overflow_repair_ratio=0.1",
        MmluConfig(
            comparison=Comparison(
                methods=tuple(ComparedOverflow(method=name, **METHODS_OF) for name in ("of", "ca")),
                window=512,
                step_tokens=64,
            ),
            **MMLU,
        ),
    ),
    (f"evaluate --task=blend_gate --max_kl=0.2 {typed(BLENDS)}", GateConfig(blends=Blends(**BLENDS), max_kl=0.2)),
]


@pytest.mark.parametrize(("line", "config"), FIELDS, ids=[line[:45] for line, _ in FIELDS])
def test_flags_of_a_script_are_fields_of_its_config(line, config):
    assert config_of(*line.split()) == config


def test_a_method_may_say_what_it_has_otherwise():
    found = config_of("evaluate", "--task=agreement", "--data=a", "--method=ca:anchor_tokens=16:repair_ratio=0.2")
    assert list(found.comparison.by_name) == ["tt, keep 4", "ca, keep 4, anchor 16, spread repair 20%"]
    found = config_of("evaluate", "--task=ppl", "--data=a", "--method=ca:drift=a.npz:discarder=sinks")
    assert found.comparison.methods == (ComparedOverflow(drift="a.npz", discarder="sinks"),)


REFUSED = {
    "bench --suite=ttft": {
        "--history_tokens=9,x": "history_tokens must be whole numbers with commas between them, got '9,x'",
        "--num_jobs=9": "num_jobs must be left out of suite ttft",
        "--norecompute_if_faster": "recompute_if_faster must be left out of suite ttft",
    },
    "bench --suite=preload": {"--load_ratios=fast": "load_ratios must be numbers with commas between them"},
    "bench --suite=policy": {
        "--max_batch_size=3": "max_batch_size must be left out of suite policy",
        "--model=x.gguf": "model must be left out of suite policy",
    },
    "evaluate --data=a --task=ppl": {
        "--method=tt,cc": "one of ca, tt, of, nkvt; .* 'cc'",
        "--method=ca:anchor=1": r"got 'anchor=1' in 'ca:anchor=1'; did you mean anchor_tokens\?",
        "--method=ca:discarder=x": "oldest",
        "--method=ca:anchor_tokens=x": "anchor_tokens must be an integer, got 'x'",
        "--every=256": "every must be left out of task ppl",
        "--ratios=1": "ratios must be left out of task ppl",
        "--keep_first_tokens=1024": "keep_first_tokens .*1024",
    },
    "evaluate --task=ppl": {"--window=9": "data must be what ppl reads, got none"},
    "evaluate --data=a --task=mmlu": {"--plot_out=a.png": "plot_out must be left out of task mmlu"},
    "evaluate --task=rag": {
        "--figure=9": "figure must be one of 6, 7, 8, 12, 15, 16, 17; got 9",
        "--storage_gb_s=0": "storage_gb_s",
        "--window=128": "window must be left out of task rag",
        "--json_out=": "json_out must be a file for what rag gives, got none",
    },
    "evaluate --task=blend_gate": {"--figure=6": "figure must be left out of task blend_gate"},
    "demo": {"--turns=1": "turns must be at least 2, got 1"},
}


@pytest.mark.parametrize(
    ("line", "flag", "message"), [(line, *each) for line, some in REFUSED.items() for each in some.items()]
)
def test_flags_that_a_script_cannot_do_as_are_refused_by_name(line, flag, message):
    with pytest.raises(ValueError, match=message):
        config_of(*line.split(), flag)


@pytest.mark.parametrize(
    ("script", "shown"),
    [
        ("chat", ["blend_mode", "dram_gib", "overflow_method", "context_window"]),
        ("serve", sorted(own_fields(ServerConfig))),
        ("demo", ["ssd_dir", "turns"]),
        ("bench", ["suite", "history_tokens", "read_buffer"]),
        ("evaluate", ["task", "method", "window", "keep_first_tokens"]),
        ("gpu_bench", ["budget_s", "sections"]),
    ],
)
def test_the_help_of_a_script_shows_its_flags_and_an_example(script, shown):
    text = run_script(script, "--help").out.replace("[no]", "")
    assert [name for name in shown if f"--{name}: " not in text] == []
    assert f"python -m ca_jax.launch.{script} " in text
