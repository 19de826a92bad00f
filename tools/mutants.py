"""Seeded random mutants of modules whose mistakes are silent: how many the tests that matter notice, and which live.

    make mutants ARGS="--count=20 --seed=1 scheduler lineage"

Each mutant is one change that cosmic-ray makes: another operator, comparison, number, keyword, exception or loop. Its
tests run in a copy of the tree, with the environment of --python; a mutant dies if one of them fails or does not end.
Mutants of annotations alone change nothing and are not drawn. Those that live are to be looked at one by one: some are
equivalent. Exits with 1 where fewer than --least of all die.

cosmic-ray is not among the packages that the project installs: `make mutants` makes an environment of its own for it.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_code

ROOT = Path(__file__).resolve().parent.parent
TARGETS = {
    "scheduler": ("ca_jax/serving/scheduler.py", ["tests/test_scheduler.py"]),
    "placement": ("ca_jax/storage/placement/policy.py", ["tests/storage/test_policy.py"]),
    "lineage": (
        "ca_jax/storage/tokens.py",
        ["tests/storage/test_tokens.py", "tests/storage/test_truncation.py", "tests/storage/test_prefixes.py"],
    ),
    "seals": ("ca_jax/storage/layout.py", ["tests/storage/test_layout.py", "tests/storage/test_groups.py"]),
    "router": ("ca_jax/server/router.py", ["tests/server/test_router.py"]),
    "truncation": (
        "ca_jax/storage/truncation.py",
        ["tests/storage/test_truncation.py", "tests/storage/test_truncation_ssd.py"],
    ),
}
"""Modules, and the tests that must notice what is wrong with each."""
_LEFT_OUT = shutil.ignore_patterns(".git", ".venv*", "build", "results", "docs", "__pycache__", ".*_cache")
_ANNOTATIONS = ("annassign", "tfpdef", "param")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One change of a module."""

    operator: str
    """cosmic-ray's name of what changes it."""
    occurrence: int
    """Which of the places where the operator applies."""
    line: int
    """Where, from 1."""

    def of(self, code: str) -> str:
        """The module's code with the change."""
        changed: str | None = mutate_code(code, plugins.get_operator(self.operator)(), self.occurrence)
        if changed is None:
            raise RuntimeError(f"{self} must change the module, got nothing changed")
        return changed


def mutants(path: Path) -> list[Mutant]:
    """All mutants of a module, but for those of annotations."""
    nodes = list(ast_nodes(get_ast_from_path(path)))
    found = []
    for name in sorted(plugins.operator_names()):
        operator = plugins.get_operator(name)
        if operator.arguments() or name.endswith("no-op"):
            continue
        places = [(node, start) for node in nodes for start, _ in operator().mutation_positions(node)]
        kept = [(index, start) for index, (node, start) in enumerate(places) if not _is_annotation(node)]
        found += [Mutant(name, index, start[0]) for index, start in kept]
    return found


def _is_annotation(node: Any) -> bool:
    """Whether a node of the syntax tree stands in an annotation; a default value beside one counts too."""
    while (parent := node.parent) is not None:
        before = node.get_previous_sibling() if parent.type == "funcdef" else None
        if parent.type in _ANNOTATIONS or (before is not None and before.type == "operator" and before.value == "->"):
            return True
        node = parent
    return False


def failure(tree: Path, python: str, tests: list[str], limit_s: float) -> str:
    """What is said of the first test that fails, or does not end, in a copy of the tree; empty where all pass."""
    command = [python, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return f"no end within {limit_s:g} s"
    return done.stdout.decode()[-2000:] or "nothing printed" if done.returncode else ""


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="*", help=f"of {', '.join(TARGETS)}; by default all")
    parser.add_argument("--count", type=int, default=20, help="mutants of each module")
    parser.add_argument("--seed", type=int, default=0, help="of the choice")
    parser.add_argument("--least", type=float, default=0.9, help="share of all mutants that must die")
    parser.add_argument("--limit_s", type=float, default=300.0, help="most seconds that the tests of one may take")
    parser.add_argument("--python", default=str(ROOT / ".venv/bin/python"), help="runs the tests")
    args = parser.parse_args()
    if unknown := set(args.targets) - set(TARGETS):
        parser.error(f"targets must be of {', '.join(TARGETS)}; got {', '.join(sorted(unknown))}")
    num_drawn = num_dead = 0
    with tempfile.TemporaryDirectory() as name:
        tree = Path(name) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=_LEFT_OUT)
        for target in args.targets or TARGETS:
            source, tests = TARGETS[target]
            code, everything = (ROOT / source).read_text(encoding="utf-8"), mutants(ROOT / source)
            if said := failure(tree, args.python, tests, args.limit_s):
                sys.exit(f"the tests of {target} must pass before anything is changed, got {said}")
            drawn = random.Random(f"{target} {args.seed}").sample(everything, min(args.count, len(everything)))
            living = []
            for mutant in drawn:
                (tree / source).write_text(mutant.of(code), encoding="utf-8")
                if not failure(tree, args.python, tests, args.limit_s):
                    living.append(mutant)
            (tree / source).write_text(code, encoding="utf-8")
            num_drawn, num_dead = num_drawn + len(drawn), num_dead + len(drawn) - len(living)
            print(f"{target}: {len(drawn) - len(living)} of {len(drawn)} die, drawn from {len(everything)}", flush=True)
            for mutant in living:
                print(f"  lives: {source}:{mutant.line}, {mutant.operator}")
                changes = difflib.unified_diff(code.splitlines(), mutant.of(code).splitlines(), n=0, lineterm="")
                print("\n".join(f"    {line}" for line in list(changes)[3:]), flush=True)
    print(f"all: {num_dead} of {num_drawn} die")
    sys.exit(num_dead < args.least * num_drawn)


if __name__ == "__main__":
    main()
