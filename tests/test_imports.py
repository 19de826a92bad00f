"""Imports run one way, jax stays out of what the simulator runs, and the checker that says so sees what it should."""

import ast
import dataclasses
import graphlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import ca_jax

# Rooms (subpackages and modules right under ca_jax; "" is the package itself) by floor, the lowest first. A room
# imports lower floors alone; imports for type checkers and in functions count like all others.
FLOORS = (
    {"errors", "telemetry"},
    {"models", "storage"},
    {"overflow", "turns", "testing"},
    {"config", "session"},
    {"device"},
    {"pretrained"},
    {"kv"},
    {"recompute"},
    {"serving"},
    {"engine"},
    {""},
    {"simulate", "server"},
    {"evaluation"},
    {"launch"},
    {"__main__"},
)
# The same within storage.
STORAGE_FLOORS = (
    {"layout", "records"},
    {"tokens"},
    {"placement", "catalog"},
    {"config", "tiers"},
    {"tickets"},
    {"sessions"},
    {"flush"},
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
# Quality is measured over the model alone, so that what is measured is not what it is measured with.
STRANGERS = {
    "evaluation": {"kv", "serving", "session", "engine", "", *("device.runner", "device.slots")},
}
# Modules, or rooms of them, that load no jax.
WITHOUT_JAX = {
    *("errors", "telemetry.timeline", "telemetry.wakeup", "storage", "overflow", "turns", "config", "session"),
    *("simulate.clock", "simulate.config", "simulate.paper", "simulate.server", "simulate.traces"),
    *("kv.costs", "serving.scheduler"),
}
JAX_PACKAGES = {"jax", "jaxlib", "flax", "optax", "orbax", "chex"}
LINKS = {"models", "storage", "launch"}


@dataclasses.dataclass(frozen=True)
class Import:
    """One name imported, as written, and whether importing the module that says so imports it too."""

    target: str
    eager: bool


Modules = dict[str, tuple[Import, ...]]  # by dotted name; a package's is that of its __init__


def imports_of(nodes: Iterable[ast.AST], eager: bool = True) -> Iterator[Import]:
    """Every import; in a function or for type checkers alone it is not eager, anywhere else it is."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, eager) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (f"{node.module}." if node.module else "")
            yield from (Import(start + alias.name, eager) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            yield from imports_of(node.body, eager=False)
            yield from imports_of(node.orelse, eager)
        else:
            deferred = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from imports_of(ast.iter_child_nodes(node), eager and not deferred)


def read_package(root: Path) -> Modules:
    modules = {}
    for path in sorted(root.rglob("*.py")):
        parts = (root.name, *path.relative_to(root).with_suffix("").parts)
        name = ".".join(parts).removesuffix(".__init__")
        modules[name] = tuple(imports_of([ast.parse(path.read_text(encoding="utf-8"), str(path))]))
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
    for name, imports in modules.items():
        for each in imports:
            if each.target.startswith(".") or each.target.split(".")[0] in LINKS:
                yield f"{name} imports {each.target}: write it from ca_jax on"


def upward(modules: Modules, floors: Iterable[set[str]] = FLOORS, within: str = "ca_jax") -> Iterator[str]:
    """Imports among the rooms of a package of one that is not on a lower floor, or that is a stranger."""
    floor_of = floors_of(floors)
    for name in (each for each in modules if f"{each}.".startswith(f"{within}.")):
        for target in sorted({resolve(each.target, modules) for each in modules[name]} - {""}):
            room, other = room_of(name, within), room_of(target, within)
            if room == other or not f"{target}.".startswith(f"{within}."):
                continue
            if floor_of[other] >= floor_of[room] or (within == "ca_jax" and is_within(target, STRANGERS.get(room, ()))):
                yield f"{name} -> {target}"


def loaded_by(name: str, modules: Modules, *, eager: bool) -> list[str]:
    """What importing a module loads of the package: modules, and the subpackages they are in; or what it ever loads."""
    loaded = set()
    for each in modules[name]:
        target = resolve(each.target, modules) if each.eager or not eager else ""
        while "." in target:
            loaded.add(target)
            target = target.rpartition(".")[0]
    return sorted(target for target in loaded if not f"{name}.".startswith(f"{target}."))


def cycles(modules: Modules) -> Iterator[str]:
    try:
        graphlib.TopologicalSorter({name: loaded_by(name, modules, eager=False) for name in modules}).prepare()
    except graphlib.CycleError as error:
        yield " -> ".join(error.args[1][::-1])


def jax_behind(modules: Modules) -> Iterator[str]:
    """Chains of imports by which a module that must not load jax does, the shortest for each."""
    for start in (name for name in modules if is_within(name, WITHOUT_JAX)):
        trails, seen = [(start,)], {start}
        while trails:
            trail = trails.pop(0)
            jax = [
                each.target for each in modules[trail[-1]] if each.eager and each.target.split(".")[0] in JAX_PACKAGES
            ]
            if jax:
                yield " -> ".join((*trail, jax[0]))
                break
            new = [target for target in loaded_by(trail[-1], modules, eager=True) if target not in seen]
            seen.update(new)
            trails.extend((*trail, target) for target in new)


@pytest.fixture(scope="module")
def package() -> Modules:
    modules = read_package(Path(ca_jax.__file__).parent)
    assert "ca_jax.models.config" in modules, "read the wrong directory"
    return modules


def test_every_room_has_a_floor(package):
    assert {room_of(name) for name in package} == floors_of(FLOORS).keys()
    of_storage = {room_of(name, "ca_jax.storage") for name in package if name.startswith("ca_jax.storage")}
    assert of_storage == floors_of(STORAGE_FLOORS).keys()


def test_imports_are_written_from_the_package_on(package):
    assert list(badly_written(package)) == []


def test_imports_run_one_way(package):
    assert list(upward(package)) == []
    assert list(upward(package, STORAGE_FLOORS, "ca_jax.storage")) == []


def test_imports_have_no_cycle(package):
    assert list(cycles(package)) == []


def test_what_the_simulator_runs_loads_no_jax(package):
    assert list(jax_behind(package)) == []


# The checker itself, on packages made to keep or to break each rule.


def made(root: Path, sources: dict[str, str]) -> Modules:
    rooms = {f"{name.partition('/')[0]}/__init__" for name in sources if "/" in name}
    for name in {"__init__", "models/__init__", *rooms, *sources}:
        path = root / "ca_jax" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(sources.get(name, ""))
    return read_package(root / "ca_jax")


GOOD = {
    "__init__": "from ca_jax.engine import Engine",
    "session": "import time\nif TYPE_CHECKING:\n  import jax",
    "models/llama": "import jax\nfrom ca_jax.models import config\nfrom ca_jax.models.config import X",
    "models/config": "import os",
    "device/steps": "import jax\nfrom ca_jax import models\nfrom ca_jax.models.llama import Llama",
    "serving/scheduler": "from ca_jax.storage import config\ndef f():\n  import jax",
    "storage/config": "",
    "engine": "import jax, ca_jax.serving.scheduler",
}
LLAMA = "ca_jax.models.llama"
BAD = [
    (badly_written, "models/kv", "from . import config", "ca_jax.models.kv imports .config: write it from ca_jax on"),
    (badly_written, "models/kv", "from models.llama import L", "ca_jax.models.kv imports models.llama.L"),
    (upward, "kv/load", "def f():\n  import ca_jax.serving.scheduler", "ca_jax.kv.load -> ca_jax.serving.scheduler"),
    (upward, "kv/load", "if TYPE_CHECKING:\n  from ca_jax import Engine", "ca_jax.kv.load -> ca_jax"),
    (upward, "evaluation/a", "from ca_jax import Engine", "ca_jax.evaluation.a -> ca_jax"),
    (cycles, "models/config", f"def f():\n  import {LLAMA}", "ca_jax.models."),
    (jax_behind, "session", "class A:\n  from flax import linen", "ca_jax.session -> flax.linen"),
    (jax_behind, "kv/costs", "from ca_jax.device.steps import s", "ca_jax.kv.costs -> ca_jax.device.steps -> jax"),
]


def test_a_house_in_order_breaks_no_rule(tmp_path):
    for rule in (badly_written, upward, cycles, jax_behind):
        assert list(rule(made(tmp_path, GOOD))) == []


@pytest.mark.parametrize(("rule", "name", "source", "found"), BAD)
def test_an_import_that_breaks_a_rule_is_seen(tmp_path, rule, name, source, found):
    assert any(each.startswith(found) for each in rule(made(tmp_path, {**GOOD, name: source})))
