"""Replays a workload under each eviction policy, has each simulated too, and writes how far the two agree.

    .venv/bin/python -m tools.replay_vs_simulator --json_out=results/replay_vs_simulator.json -- --num_sessions=200 ...

What stands behind `--` are flags of `ca_jax.launch.replay`. To be run from the repository's root.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ca_jax.storage.placement.policy import EVICTION_POLICIES

_SHARED = ("model", "dtype", "machine", "versions", "workload")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json_out", type=Path, required=True, help="JSON file")
    parser.add_argument("flags", nargs="*", help="of ca_jax.launch.replay")
    args = parser.parse_args()
    reports = {}
    with tempfile.TemporaryDirectory() as name:
        for policy in EVICTION_POLICIES:
            path = Path(name) / f"{policy}.json"
            own = [f"--eviction_policy={policy}", "--simulate", f"--json_out={path}"]
            subprocess.run([sys.executable, "-m", "ca_jax.launch.replay", *args.flags, *own], check=True)
            reports[policy] = json.loads(path.read_text(encoding="utf-8"))
    command = shlex.join(
        ["python", "-m", "tools.replay_vs_simulator", f"--json_out={args.json_out}", "--", *args.flags]
    )
    args.json_out.write_text(json.dumps(merge(reports, command), indent=2) + "\n", encoding="utf-8")


def merge(reports: Mapping[str, Mapping[str, Any]], command: str) -> dict[str, Any]:
    """One report of those of all policies, without single turns.

    Args:
      reports: by policy.
      command: that does it again.
    """
    first = next(iter(reports.values()))
    policies = {
        policy: {"agreement": report["agreement"], "engine": report["runs"][0]["summary"]}
        for policy, report in reports.items()
    }
    agreements = [report["agreement"] for report in reports.values()]
    return {
        "suite": "replay_vs_simulator",
        **{name: first[name] for name in _SHARED},
        "command": command,
        "config": first["config"],
        "summary": {
            "worst_hit_rate_points": max(abs(each["hit_rate_points"]) for each in agreements),
            "worst_prefill_tokens_share": max(abs(each["prefill_tokens_ratio"] - 1) for each in agreements),
        },
        "policies": policies,
    }


if __name__ == "__main__":
    main()
