"""The flags of the benchmark: every field of every suite's config has one, and what is not given stays the config's."""

import dataclasses

import pytest
from absl import flags

from ca_jax.config import EngineConfig
from ca_jax.launch import bench_flags
from ca_jax.launch.bench_flags import CONFIGS
from ca_jax.launch.bench_overflow_schema import OverflowBenchConfig
from ca_jax.launch.bench_overlap_schema import PreloadBenchConfig, SaveBenchConfig
from ca_jax.launch.bench_schema import BenchConfig
from ca_jax.launch.bench_serving_schema import ThroughputBenchConfig, TtftBenchConfig
from ca_jax.overflow.config import OverflowConfig


def parsed(*arguments):
    values = flags.FlagValues()
    bench_flags.define(flag_values=values)
    values(["program", "--json_out=out.json", *arguments])
    return values


def config_of(suite, *arguments):
    return bench_flags.config(CONFIGS[suite], flag_values=parsed(f"--suite={suite}", *arguments))


def test_every_field_of_every_config_has_a_flag():
    values = parsed("--suite=ttft")
    fields = {field.name for kind in CONFIGS.values() for field in dataclasses.fields(kind)}
    assert fields - {"engine"} <= set(values)
    assert all(values[name].help for name in fields - {"engine"})


@pytest.mark.parametrize("suite", CONFIGS)
def test_without_flags_every_suite_has_its_own_defaults(suite):
    kind = CONFIGS[suite]
    assert config_of(suite) == (kind(suite=suite) if kind is BenchConfig else kind())


def test_a_default_that_help_shows_is_the_configs():
    values = parsed("--suite=ttft")
    for kind in set(CONFIGS.values()):
        for field in dataclasses.fields(kind):
            default = None if field.name in ("suite", "engine") else values[field.name].default
            if default is not None:
                wanted = field.default
                shown = tuple(type(wanted[0])(item) for item in default) if isinstance(default, list) else default
                assert shown == wanted, field.name


def test_flags_are_fields():
    assert config_of("ttft", "--history_tokens=1000,2000", "--new_tokens=50", "--repeats=2") == TtftBenchConfig(
        history_tokens=(1000, 2000), new_tokens=(50,), repeats=2
    )
    assert config_of("throughput", "--answer_tokens=8", "--concurrent_sessions=3") == ThroughputBenchConfig(
        answer_tokens=8, concurrent_sessions=3
    )
    assert config_of("preload", "--load_ratios=0.5,1", "--read_buffers=0,2") == PreloadBenchConfig(
        load_ratios=(0.5, 1.0), read_buffers=(0, 2)
    )
    assert config_of("overflow", "--overflow_methods=ca,tt", "--num_sessions=9", "--gap_methods=") == (
        OverflowBenchConfig(overflow_methods=("ca", "tt"), num_sessions=9, gap_methods=())
    )
    assert config_of("save", "--save_ratios=", "--save_answer_tokens=3") == SaveBenchConfig(
        save_ratios=(), save_answer_tokens=3
    )


@pytest.mark.parametrize("suite", ["reuse", "ttft", "throughput"])
def test_the_engines_flags_are_the_engines_config(suite):
    found = config_of(suite, "--read_buffer=3", "--max_tpot_ms=50", "--noasync_save")
    assert found.engine == EngineConfig(read_buffer=3, max_tpot_ms=50.0, async_save=False)


def test_the_flags_of_overflow_are_the_engines_too():
    found = config_of("overflow", "--truncation_ratio=0.25", "--keep_first_tokens=8", "--overflow_anchor_tokens=2")
    assert found.engine.overflow == OverflowConfig(truncation_ratio=0.25, keep_first_tokens=8, anchor_tokens=2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite=ttft", "--history_tokens=9,x"], "history_tokens wanted integers with commas between them"),
        (["--suite=preload", "--load_ratios=fast"], "load_ratios wanted numbers with commas between them"),
        (["--suite=ttft", "--history_tokens="], "history_tokens wanted one or more numbers"),
        (["--suite=overflow", "--gap_methods=ca,kept"], "gap_methods wanted different ones of ca, tt, of, nkvt"),
        (["--suite=throughput", "--read_buffer=deep"], "read_buffer wanted a number of layers or one of"),
        (["--suite=decode", "--history_tokens=9"], "history_tokens must be left out of suite decode"),
        (["--suite=tiers", "--dram_gib=9"], "dram_gib must be left out of suite tiers"),
        (["--suite=ttft", "--num_jobs=9"], "num_jobs must be left out of suite ttft"),
        (["--suite=ttft", "--norecompute_if_faster"], "recompute_if_faster must be left out of suite ttft"),
        (["--suite=preload", "--read_buffer=3"], "read_buffer must be left out of suite preload"),
        (["--suite=throughput", "--data=x.json"], "data must be left out of suite throughput"),
        (["--suite=policy", "--max_batch_size=3"], "max_batch_size must be left out of suite policy"),
        (["--suite=policy", "--model=x.gguf"], "model must be left out of suite policy"),
        (["--suite=policy", "--dtype=bfloat16"], "dtype must be left out of suite policy"),
    ],
)
def test_what_a_config_refuses_is_said_with_the_name_of_the_flag(arguments, message):
    values = parsed(*arguments)
    with pytest.raises(ValueError, match=message):
        bench_flags.config(CONFIGS[values["suite"].value], flag_values=values)
