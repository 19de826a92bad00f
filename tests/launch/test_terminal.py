"""Pieces of answers on a terminal, progress bars, and what is said of the machine."""

import dataclasses
import datetime
import importlib.metadata
import io
import json
import os
import platform

import rich.console

from benchmarks.tables import summarize_machine
from ca_jax.launch import machine
from ca_jax.launch.script import printable
from ca_jax.launch.terminal import describe_overflow, describe_usage, progress_bars, write_piece
from tests.launch.conftest import usage

TOOK = {"prompt_tokens": 1192, "cached_tokens": {"dram": 1173, "ssd": 0}, "completion_tokens": 65, "ttft_s": 0.1384}
USAGE = usage(**TOOK, load_s=0.05, decode_s=2.0)


def test_pieces_come_out_as_they_are_but_for_what_steers_the_terminal():
    output = io.StringIO()
    console = rich.console.Console(file=output, width=10)
    for piece in ("a [b]bold[/b] ", ":smile: ", "\x1b[2J\r", "\n\tlonger than the line é 😀"):
        write_piece(console, piece)
    assert output.getvalue() == "a [b]bold[/b] :smile: \ufffd[2J\ufffd\n" + " " * 8 + "longer than the line é 😀"
    assert printable("\x07\x7f\x9b") == "\ufffd" * 3


def test_a_turn_is_described_with_the_tiers_that_gave_something():
    text = "TTFT 138 ms · cached 1,173 of 1,192 prompt tokens (dram 1,173) · new 19 · "
    assert describe_usage(USAGE) == f"{text}answer 65 · decode 32.0 tokens/s"
    other = {"repaired_tokens": 1033, "missed_chunks": 1, "completion_tokens": 1, "decode_s": 0.0}  # No rate of one.
    found = describe_usage(dataclasses.replace(USAGE, **other))
    assert found == f"{text}recomputed 1,033 · missed chunks 1 · answer 1"


def test_what_was_dropped_is_described():
    for num_tokens, num_turns, oldest, text in (
        (0, 0, True, ""),
        (1512, 2, True, "context full: dropped the oldest 1,512 tokens (2 turns)"),
        (1, 0, False, "context full: dropped 1 token"),
    ):
        usage = dataclasses.replace(USAGE, dropped_tokens=num_tokens)
        assert describe_overflow(usage, num_turns, oldest=oldest) == text


def test_each_thing_that_is_done_has_one_bar():
    output = io.StringIO()
    console = rich.console.Console(file=output, width=80)
    with progress_bars(console) as progress:
        for done in (1, 2, 4):
            progress("reading", done, 4)
        progress("compile", 1, 3)
    (reading, compiling) = output.getvalue().strip().splitlines()
    assert reading.startswith("reading")
    assert "100%" in reading
    assert compiling.startswith("compile")
    assert "33%" in compiling


# What is said of the machine and of versions.


def test_the_description_is_of_this_process_and_fits_json(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    found = machine.describe_machine()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (bool(found["cpu"]), 1 <= found["cores"] <= os.cpu_count()) == (True, True)
    assert (found["os"], found["environment"]["OMP_NUM_THREADS"]) == (platform.platform(), "3")
    assert datetime.datetime.fromisoformat(found["date"]).utcoffset() == datetime.timedelta(0)
    gpu = {"cpu": "Foo", "cores": 2, "memory_gib": None, "platform": "gpu", "device": "Bar 100", "num_devices": 4}
    assert summarize_machine(gpu) == "Foo, 2 cores, 4 x Bar 100"
    versions = machine.describe_versions(("numpy", "no-such-package-here"))
    assert versions == {
        "python": platform.python_version(),
        "numpy": importlib.metadata.version("numpy"),
        "no-such-package-here": None,
    }
