"""Imports run one way, jax stays out of what the simulator runs, and the checker that says so sees what it should."""

import ast
import collections
import graphlib
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import ca_jax

# Rooms (subpackages and modules right under ca_jax; "" is the package itself) by floor, the lowest first. A room
# imports lower floors alone; imports for type checkers and in functions count like all others.
FLOORS = (
    {"errors", "telemetry", "backend", "native"},
    {"private"},
    {"models", "storage"},
    {"overflow", "turns", "testing"},
    {"config", "session"},
    {"device"},
    {"pretrained"},
    {"kv"},
    {"recompute"},
    {"serving"},
    {"engine"},
    {"edits"},
    {""},
    {"simulate", "server"},
    {"cluster"},
    {"launch"},
    {"__main__"},
)
# The same within storage.
STORAGE_FLOORS = (
    {"transform_amx"},
    {"layout", "records", "transform"},
    {"tokens", "planes"},
    {"placement", "catalog", "objects"},
    {"codec"},
    {"layer_codec"},
    {"config", "tiers"},
    {"tickets"},
    {"sessions"},
    {"ssd"},
    {"tiering"},
    {"truncation"},
    {"transfers"},
    {"opening"},
    {"store"},
    {""},
    {"inspector"},
    {"collect"},
)
# Modules, or rooms of them, that load no jax.
WITHOUT_JAX = {
    *("errors", "telemetry.timeline", "telemetry.wakeup", "storage", "overflow", "turns", "config", "session"),
    *("native", "simulate"),
    *("kv.costs", "serving.scheduler"),
}
LINKS = {"models", "storage", "launch"}

Modules = dict[str, list[str]]
"""By dotted name (a package's is that of its __init__) all names that a module imports, anywhere in it, as written."""


def imports_of(tree: ast.AST) -> Iterator[str]:
    """What a module imports, wherever in it. Looks at statements alone: most nodes are in expressions."""
    nodes = collections.deque([tree])
    while nodes:
        node = nodes.popleft()
        inner = ast.stmt, ast.ExceptHandler, ast.match_case
        nodes += [child for child in ast.iter_child_nodes(node) if isinstance(child, inner)]
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (f"{node.module}." if node.module else "")
            yield from (start + alias.name for alias in node.names)


def read_package(root: Path) -> Modules:
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = (root.name, *path.relative_to(root).with_suffix("").parts)
        tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
        modules[".".join(parts).removesuffix(".__init__")] = list(imports_of(tree))
    return modules


def resolve(target: str, modules: Modules) -> str:
    """The module of the package that has the name imported; "" where that is not of the package."""
    while target and target not in modules:
        target = target.rpartition(".")[0]
    return target


def room_of(name: str, within: str = "ca_jax") -> str:
    """The room of a module that is in a package; "" is the package itself."""
    return name.removeprefix(within).lstrip(".").partition(".")[0]


def floors_of(floors: Iterable[set[str]]) -> dict[str, int]:
    return {room: floor for floor, rooms in enumerate(floors) for room in rooms}


def is_within(name: str, places: Iterable[str]) -> bool:
    """Whether a module of the package is one of these, or in one of them; "" is the package itself."""
    inner = name.partition(".")[2]
    return inner in places or any(place and inner.startswith(f"{place}.") for place in places)


def badly_written(modules: Modules) -> Iterator[str]:
    for name, targets in modules.items():
        for target in targets:
            if target.startswith(".") or target.split(".")[0] in LINKS:
                yield f"{name} imports {target}: write it from ca_jax on"


def upward(modules: Modules, floors: Iterable[set[str]] = FLOORS, within: str = "ca_jax") -> Iterator[str]:
    """Imports among the rooms of a package of one that is not on a lower floor."""
    floor_of = floors_of(floors)
    for name in (each for each in modules if f"{each}.".startswith(f"{within}.")):
        for target in sorted({resolve(each, modules) for each in modules[name]} - {""}):
            room, other = room_of(name, within), room_of(target, within)
            if room == other or not f"{target}.".startswith(f"{within}."):
                continue
            if floor_of[other] >= floor_of[room]:
                yield f"{name} -> {target}"


def cycles(modules: Modules) -> Iterator[str]:
    graph = {name: {resolve(each, modules) for each in targets} - {"", name} for name, targets in modules.items()}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        yield " -> ".join(error.args[1][::-1])


@pytest.fixture(scope="module")
def package() -> Modules:
    modules = read_package(Path(ca_jax.__file__).parent)
    assert "ca_jax.models.config" in modules, "read the wrong directory"
    return modules


def test_every_room_has_a_floor(package):
    assert {room_of(name) for name in package} == floors_of(FLOORS).keys()
    of_storage = {room_of(name, "ca_jax.storage") for name in package if name.startswith("ca_jax.storage")}
    assert of_storage == floors_of(STORAGE_FLOORS).keys()


def test_imports_run_one_way_without_cycles_and_are_written_from_the_package_on(package):
    assert list(badly_written(package)) == []
    assert list(upward(package)) == []
    assert list(upward(package, STORAGE_FLOORS, "ca_jax.storage")) == []
    assert list(cycles(package)) == []


def test_what_the_simulator_runs_loads_no_jax(package):
    """In a process of its own, where importing `ca_jax` itself brings nothing."""
    names = [name for name in package if is_within(name, WITHOUT_JAX)]
    code = (
        "import importlib, sys, types\n"
        "sys.modules['ca_jax'] = package = types.ModuleType('ca_jax')\n"
        "package.__path__ = [sys.argv[1]]\n"
        "for name in sys.argv[2:]:\n"
        "    importlib.import_module(name)\n"
        "    assert not {'jax', 'flax', 'optax', 'orbax', 'chex'} & sys.modules.keys(), name\n"
    )
    command = [sys.executable, "-c", code, str(Path(ca_jax.__file__).parent), *names]
    subprocess.run(command, check=True, timeout=120)


# The checker itself, on packages made to keep or to break each rule.

GOOD = {
    "ca_jax": ["ca_jax.engine.Engine"],
    "ca_jax.session": ["time", "jax"],
    "ca_jax.models.llama": ["ca_jax.models.config", "ca_jax.models.config.X"],
    "ca_jax.models.config": ["os"],
    "ca_jax.serving.scheduler": ["ca_jax.models.llama.Llama"],
    "ca_jax.engine": ["jax", "ca_jax.serving.scheduler"],
}


@pytest.mark.parametrize(
    ("rule", "name", "source", "found"),
    [
        (badly_written, "models.kv", "from . import config", "ca_jax.models.kv imports .config: write it"),
        (badly_written, "models.kv", "from models.llama import L", "ca_jax.models.kv imports models.llama.L"),
        (upward, "kv.a", "def f():\n  import ca_jax.serving.scheduler", "ca_jax.kv.a -> ca_jax.serving.scheduler"),
        (upward, "kv.a", "if TYPE_CHECKING:\n  from ca_jax import Engine", "ca_jax.kv.a -> ca_jax"),
        (cycles, "models.config", "def f():\n  import ca_jax.models.llama", "ca_jax.models."),
    ],
)
def test_an_import_that_breaks_a_rule_is_seen(rule, name, source, found):
    assert list(rule(GOOD)) == []
    broken = {**GOOD, f"ca_jax.{name}": list(imports_of(ast.parse(source)))}
    assert any(each.startswith(found) for each in rule(broken))
