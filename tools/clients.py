r"""Runs public clients, unmodified, on `ca_jax serve`: one row a client in docs/guides/clients.md, with transcripts.

    python -m venv build/clients && build/clients/bin/pip install anthropic guidellm langchain-openai litellm llm openai
    .venv/bin/python -m tools.clients --python=build/clients/bin/python --aiperf=build/aiperf/bin/aiperf \
        --inference_perf=build/inference_perf/bin/inference-perf

Scripts are those of `tools/client_scripts`; load generators do a little of what `tools.load_generators` has them do.
With --only the other clients keep their rows. It exits with 1 where a client failed.

Not here: what the same clients must get, byte for byte (`tests.server`).
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.servers import started
from ca_jax.launch.machine import describe_machine, describe_versions
from tools.load_generators import Mode, Run, _write_tokenizer

_SCRIPTS = Path(__file__).resolve().parent / "client_scripts"
_PAGE = Path(__file__).resolve().parent.parent / "docs" / "guides" / "clients.md"
_LIMIT_S = 300.0
_CLIENTS = {
    "openai": "openai_sdk",
    "anthropic": "anthropic_sdk",
    "an agent with one tool": "agent",
    "langchain-openai": "langchain_openai_chat",
    "litellm": "litellm_sdk",
    "llm": "llm_cli",
}
"""By name, their scripts."""
_LOAD = Mode("multi_turn", streams=2, conversations=3, seed=5, turns=3)
_SAID_OF_LOAD = "2 conversations at a time, 3 turns each, streamed: each turn with all that was said"
_BEGIN = "<!-- rows: written by tools/clients.py -->\n"
_END = "<!-- end of rows -->\n"


@dataclasses.dataclass(frozen=True)
class Row:
    """What came of a client."""

    client: str
    version: str
    ran: str
    outcome: str
    transcript: str = ""
    date: str = ""
    """When, where that was not with the others."""


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="of the environment that the clients are in")
    parser.add_argument("--aiperf", help="its executable")
    parser.add_argument("--inference_perf", help="its executable")
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--only", action="append", help="a client; by default all. Others keep their rows")
    parser.add_argument("--json_out", type=Path, default=Path("results/server/clients.json"))
    args = parser.parse_args()
    rows: list[Row] = []
    serve = [sys.executable, "-m", "ca_jax.launch.serve", f"--model={args.model}", "--tool_call_parser=hermes"]
    with tempfile.TemporaryDirectory(prefix="clients_") as name:
        folder = Path(name)
        _write_tokenizer(args.model, folder)
        with started("ca_jax", lambda port: [*serve, f"--port={port}"], {}) as url:
            for client, script in _CLIENTS.items():
                if not args.only or client in args.only:
                    rows.append(_run(client, _SCRIPTS / f"{script}.py", args, url))
            guidellm = str(Path(args.python).parent / "guidellm")
            tools = {"guidellm": guidellm, "aiperf": args.aiperf, "inference_perf": args.inference_perf}
            for tool, path in tools.items():
                if path and (not args.only or tool in args.only):
                    rows.append(_load(Run(tool, path, _LOAD, args.model, url, 60, folder / tool)))
    if args.only:
        rows = [dataclasses.replace(row, date=time.strftime("%Y-%m-%d")) for row in rows]
    for row in rows:
        print(row.client, row.version, row.outcome, row.transcript, sep="\n", end="\n\n")
    found: dict[str, Any] = {"machine": describe_machine(), "versions": describe_versions(), "model": args.model}
    all_rows = {row.client: row for row in rows}
    if args.only:
        found = json.loads(args.json_out.read_text(encoding="utf-8"))
        all_rows = {each["client"]: Row(**each) for each in found["clients"]} | all_rows
    found["clients"] = [dataclasses.asdict(row) for row in all_rows.values()]
    args.json_out.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    _write_page(list(all_rows.values()))
    sys.exit(any(row.outcome != "passed" for row in rows))


def _run(client: str, script: Path, args: argparse.Namespace, url: str) -> Row:
    package = "openai" if client.startswith("an agent") else client
    says = f"import importlib.metadata; print(importlib.metadata.version({package!r}))"
    version = subprocess.run([args.python, "-c", says], capture_output=True, text=True, check=True).stdout.strip()
    command = [args.python, str(script), url, args.model]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_LIMIT_S)
    about = (ast.get_docstring(ast.parse(script.read_text(encoding="utf-8"))) or "").partition(": ")[2]
    outcome = "passed" if done.returncode == 0 else f"failed with status {done.returncode}"
    told = done.stdout + (done.stderr if done.returncode else "")
    name = f"openai {version}" if package != client else version
    return Row(client, name, f"`tools/client_scripts/{script.name}`: {about.rstrip('.')}", outcome, told)


def _load(run: Run) -> Row:
    name = run.tool.replace("_", "-")
    try:
        told = run.measure()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return Row(name, "", _SAID_OF_LOAD, "failed", str(error)[-2000:])
    is_good = told["requests"] == _LOAD.requests and not told["errors"] and told["returning_turns_found"]
    return Row(name, told["version"], _SAID_OF_LOAD, "passed" if is_good else "failed", json.dumps(told))


def _write_page(rows: list[Row]) -> None:
    """Puts the rows into the page, in place of those that are there."""
    text = _PAGE.read_text(encoding="utf-8")
    before, behind = text.partition(_BEGIN)[0], text.partition(_END)[2]
    lines = [f"| {row.client} | {row.version} | {row.ran} | {row.outcome} |\n" for row in rows]
    table = "".join(["| client | version | what was run | outcome |\n", "|---|---|---|---|\n", *lines])
    _PAGE.write_text(f"{before}{_BEGIN}{table}{_END}{behind}", encoding="utf-8")


if __name__ == "__main__":
    main()
