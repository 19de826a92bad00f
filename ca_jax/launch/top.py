"""Shows what a server is doing, live: its slots and queue, its tiers, and how fast it computes and moves KV.

    ca_jax top                                   the server at http://127.0.0.1:8000, until Ctrl-C
    ca_jax top --url=http://host:8000 --api_key=... --interval_s=2
    ca_jax top --once                            a second of it, printed once: for scripts

Rates are of the time between two looks. A key shows its tenant's conversations by name, and counts the others'.

Not here: what is shown (`ca_jax.server.live`), totals for Prometheus (`/metrics`).
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import rich.console
import rich.live
import rich.text
from absl import flags
from rich.filesize import decimal as size

from ca_jax.errors import CaJaxError
from ca_jax.launch.script import make_console, make_table, printable, run

FLAGS = flags.FLAGS
KEY_VARIABLE = "CA_JAX_API_KEY"
"""Environment variable of the key, where `--api_key` is not given."""
_TIMEOUT_S = 10.0
_MOST_ROWS = 16  # Jobs that are shown one by one.
_BAR_CELLS = 24

Snapshot = Mapping[str, Any]
"""What `/live/snapshot` says, see `LiveSnapshot`."""


class TopError(CaJaxError):
    """A server does not say what it is doing; the message says why."""


def fetch(url: str, api_key: str | None) -> Snapshot:
    """What the server at a URL is doing now.

    Raises:
      TopError: the server cannot be reached, refuses the request, or is not a ca_jax server.
    """
    request = urllib.request.Request(f"{url.rstrip('/')}/live/snapshot")
    if api_key:
        request.add_header("Authorization", f"Bearer {api_key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            found = json.load(response)
            return {name: found[name] for name in ("at_s", "num_slots", "running", "queue", "tiers", "moves", "done")}
    except urllib.error.HTTPError as error:
        hint = f"; the key is --api_key or {KEY_VARIABLE}" if error.code == 401 else ""
        raise TopError(f"{url} must answer /live/snapshot, got {error.code} {error.reason}{hint}") from error
    except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
        raise TopError(f"{url} must be a server that runs, got {getattr(error, 'reason', error)}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise TopError(f"{url} must be a server of ca_jax, got another answer ({error!r})") from error


def screen(now: Snapshot, before: Snapshot) -> rich.console.Group:
    """What is shown of two looks."""
    return rich.console.Group(*_parts(now, before))


def _parts(now: Snapshot, before: Snapshot) -> Iterator[Any]:
    seconds = max(now["at_s"] - before["at_s"], 1e-9)
    done, rate = now["done"], {name: (now["done"][name] - before["done"][name]) / seconds for name in now["done"]}
    cached = done["cached_tokens"] / done["prompt_tokens"] if done["prompt_tokens"] else 0.0
    computed = rate["prompt_tokens"] - rate["cached_tokens"]
    queue, running = now["queue"], now["running"]
    yield _line(
        f"{len(running)} of {now['num_slots']} slots, {queue['num_waiting']} waiting · {done['turns']:,} turns, "
        f"{60 * rate['turns']:.1f} a minute · generated {rate['completion_tokens']:,.1f} tokens/s, prompts "
        f"{rate['prompt_tokens']:,.0f} tokens/s ({computed:,.0f} computed) · cached {cached:.1%} of prompts so far"
    )
    if done["draft_tokens"]:
        share = done["accepted_tokens"] / done["draft_tokens"]
        yield _line(f"drafts: {done['accepted_tokens']:,} tokens of answers took no step, {share:.0%} of those checked")
    tiers = [
        (
            tier["name"],
            _bar(tier["used_bytes"], tier["capacity_bytes"]),
            f"{size(tier['used_bytes'])} of {size(tier['capacity_bytes'])}",
            f"{tier['num_sessions']:,}",
            f"{tier['num_hits']:,}",
            f"{tier['num_evictions']:,}",
        )
        for tier in now["tiers"]
    ]
    yield make_table(("tier", "", "used", ">sessions", ">hits", ">evictions"), tiers)
    moved = {move["name"]: move["num_bytes"] for move in before["moves"]}
    moves = [
        (
            move["name"],
            f"{size(int((move['num_bytes'] - moved.get(move['name'], 0)) / seconds))}/s",
            f"{size(move['num_bytes'])} in {move['num_moves']:,}",
            "-" if move["bytes_per_s"] is None else f"{size(int(move['bytes_per_s']))}/s",
        )
        for move in now["moves"]
    ]
    yield make_table(("move", ">now", ">so far", ">speed of one"), moves)
    jobs = [(str(job["slot"]), job["phase"], *_who(job)) for job in running]
    jobs += [
        ("-", f"waits, KV {_PLACES.get(job['residency'], job['residency'])}", *_who(job)) for job in queue["waiting"]
    ]
    if jobs:
        more = len(running) + queue["num_waiting"] - len(jobs[:_MOST_ROWS])
        title = f"and {more} more" if more else ""
        yield make_table((">slot", "phase", "session", ">tokens"), jobs[:_MOST_ROWS], title=title)


_PLACES = {"dram": "in DRAM", "ssd": "on SSD", "pending": "on its way", "absent": "nowhere"}


def _who(job: Mapping[str, Any]) -> tuple[str, str]:
    name = job["session_id"] or ("(no session)" if job["is_own"] else "(another tenant's)")
    return name, f"{job['num_tokens']:,}" if job["is_own"] else "-"


def _bar(used: int, capacity: int) -> str:
    filled = round(_BAR_CELLS * min(used / capacity, 1)) if capacity else 0
    return "█" * filled + "░" * (_BAR_CELLS - filled)


def _line(text: str) -> rich.text.Text:
    return rich.text.Text(printable(text))


def _define_flags() -> None:
    """Only where this is the program: scripts share names of flags."""
    flags.DEFINE_string("url", "http://127.0.0.1:8000", "Of the server.")
    flags.DEFINE_string("api_key", None, f"Key of a tenant; by default what {KEY_VARIABLE} says.")
    flags.DEFINE_float("interval_s", 1.0, "Seconds between two looks.", lower_bound=0.1)
    flags.DEFINE_boolean("once", False, "Look for one interval, print it, and end.")


def main(_: Sequence[str]) -> None:
    """Runs from the command line."""
    api_key, console = FLAGS.api_key or os.environ.get(KEY_VARIABLE), make_console()
    before = fetch(FLAGS.url, api_key)
    if FLAGS.once:
        time.sleep(FLAGS.interval_s)
        console.print(screen(fetch(FLAGS.url, api_key), before))
        return
    try:
        with rich.live.Live(console=console, screen=console.is_terminal, auto_refresh=False) as shown:
            while True:
                time.sleep(FLAGS.interval_s)
                now = fetch(FLAGS.url, api_key)
                shown.update(screen(now, before), refresh=True)
                before = now
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    _define_flags()
    run(main)
