"""Imports run one way, jax stays out of what the simulator runs, and the checker that says so sees what it should."""

import ast
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import ca_jax

# Units (modules and subpackages right under ca_jax; "" is the package itself), from the bottom up. A unit imports its
# own level or lower ones, directly or through units that have no level. Cycles are refused everywhere.
LEVELS = (
    {"models", "storage"},
    {"discarding", "conversations", "processes"},
    {"transfer", "steps", "overflow", "drift"},
    {"scheduler", "runner", "blend", "fusion", "layer_loader", "async_saver"},
    {"histories", "write_buffer", "shared_load", "chunk_kv"},
    {"sliding", "kept_conversations"},
    {"session_kv"},
    {"truncator", "repair", "fused_history", "blending"},
    {"prefilling", "decoder"},
    {"batch"},
    {"engine"},
    {""},
    {"evaluation", "replay", "server", "simulate"},
    {"launch"},
)
LEVEL_OF = {unit: level for level, units in enumerate(LEVELS) for unit in units}
# What serves: quality is measured over the model alone, so that what is measured is not what it is measured with.
PURE = {"blend", "fusion"}
SERVING = {unit for unit, level in LEVEL_OF.items() if level >= LEVEL_OF["runner"]} - PURE - {"evaluation", "launch"}
STRANGERS = {frozenset({"models", "storage"}), *(frozenset({"evaluation", unit}) for unit in SERVING)}  # either way
WITHOUT_JAX = {
    *("scheduler", "session", "jobs", "conversations", "discarding", "overflow"),
    *("blend_config", "chunks"),
    *("costs", "blend_costs", "rates", "rate_meter", "read_buffer", "storage", "traces", "simulate"),
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
    """Every import but those for type checkers alone; in a function it is not eager, anywhere else it is."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, eager) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (f"{node.module}." if node.module else "")
            yield from (Import(start + alias.name, eager) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
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


def unit_of(name: str) -> str:
    return name.split(".")[1] if "." in name else ""


def badly_written(modules: Modules) -> Iterator[str]:
    for name, imports in modules.items():
        for each in imports:
            if each.target.startswith(".") or each.target.split(".")[0] in LINKS:
                yield f"{name} imports {each.target}: write it from ca_jax on"


def upward(modules: Modules) -> Iterator[str]:
    """Chains of imports from a unit with a level to one it must not import."""
    for start in (name for name in modules if unit_of(name) in LEVEL_OF):
        unit, trails, seen = unit_of(start), [(start,)], {start}
        while trails:
            trail = trails.pop(0)
            for target in sorted({resolve(each.target, modules) for each in modules[trail[-1]]} - seen - {""}):
                seen.add(target)
                to = unit_of(target)
                if to not in LEVEL_OF:
                    trails.append((*trail, target))
                elif LEVEL_OF[to] > LEVEL_OF[unit] or {unit, to} in STRANGERS:
                    yield " -> ".join((*trail, target))


def loaded_by(name: str, modules: Modules) -> list[str]:
    """What importing a module loads of the package: modules, and the subpackages they are in."""
    loaded = set()
    for each in modules[name]:
        target = resolve(each.target, modules) if each.eager else ""
        while "." in target:
            loaded.add(target)
            target = target.rpartition(".")[0]
    return sorted(target for target in loaded if not f"{name}.".startswith(f"{target}."))


def cycles(modules: Modules) -> Iterator[str]:
    done = set()

    def visit(name: str, trail: tuple[str, ...]) -> Iterator[str]:
        if name in trail:
            yield " -> ".join((*trail[trail.index(name) :], name))
        elif name not in done:
            for target in loaded_by(name, modules):
                yield from visit(target, (*trail, name))
            done.add(name)

    for name in modules:
        yield from visit(name, ())


def jax_behind(modules: Modules) -> Iterator[str]:
    """Chains of imports by which a module that must not load jax does, the shortest for each."""
    for start in (name for name in modules if unit_of(name) in WITHOUT_JAX):
        trails, seen = [(start,)], {start}
        while trails:
            trail = trails.pop(0)
            jax = [
                each.target for each in modules[trail[-1]] if each.eager and each.target.split(".")[0] in JAX_PACKAGES
            ]
            if jax:
                yield " -> ".join((*trail, jax[0]))
                break
            new = [target for target in loaded_by(trail[-1], modules) if target not in seen]
            seen.update(new)
            trails.extend((*trail, target) for target in new)


@pytest.fixture(scope="module")
def package() -> Modules:
    modules = read_package(Path(ca_jax.__file__).parent)
    assert "ca_jax.models.config" in modules, "read the wrong directory"
    return modules


def test_imports_are_written_from_the_package_on(package):
    assert list(badly_written(package)) == []


def test_imports_run_one_way(package):
    assert list(upward(package)) == []


def test_imports_have_no_cycle(package):
    assert list(cycles(package)) == []


def test_what_the_simulator_runs_loads_no_jax(package):
    assert list(jax_behind(package)) == []


# The checker itself, on packages made to keep or to break each rule.


@pytest.fixture
def made(tmp_path):
    def make(sources: dict[str, str]) -> Modules:
        root = tmp_path / "ca_jax"
        for name in {"__init__", "models/__init__", "storage/__init__", "launch/__init__", *sources}:
            path = root / f"{name}.py"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(sources.get(name, ""))
        return read_package(root)

    return make


def test_a_house_in_order_breaks_no_rule(made):
    modules = made(
        {
            "__init__": "from ca_jax.engine import Engine",
            "errors": "import os",
            "config": "from ca_jax.storage.config import StoreConfig",
            "session": "if TYPE_CHECKING:\n  import jax\n  from ca_jax.engine import Engine",
            "jobs": "import time\nif TYPE_CHECKING:\n  from ca_jax.session import Session",
            "models/config": "from ca_jax.errors import E",
            "models/llama": "import jax\nfrom ca_jax.models import config\nfrom ca_jax.models.config import X",
            "storage/__init__": "from ca_jax.storage.dram import Dram",
            "storage/config": "from ca_jax import errors",
            "storage/dram": "import numpy\nfrom ca_jax.storage.config import StoreConfig",
            "steps": "import jax\nfrom ca_jax import models\nfrom ca_jax.models.llama import Llama",
            "scheduler": "from ca_jax.storage import dram\nfrom ca_jax.turns.jobs import Job\ndef f():\n  import jax",
            "runner": "from ca_jax import blend, drift, steps, config",
            "blend": "from ca_jax.device.steps import step",
            "drift": "import jax",
            "discarding": "if TYPE_CHECKING:\n  from ca_jax.models.llama import Llama",
            "overflow": "from ca_jax.overflow.discarding import Oldest",
            "session_kv": "from ca_jax.device.runner import Runner",
            "repair": "from ca_jax import blend, drift, runner, overflow",
            "truncator": "from ca_jax import repair, session_kv",
            "prefilling": "from ca_jax import repair, truncator",
            "engine": "import jax, ca_jax.device.runner, ca_jax.serving.scheduler, ca_jax.serving.prefilling",
            "evaluation/__init__": "",
            "evaluation/stream": "import jax\nfrom ca_jax import blend, drift, overflow, steps",
            "launch/evaluate": "from ca_jax.evaluation.stream import Stream",
            "launch/chat": "import ca_jax\nfrom ca_jax import engine\nfrom ca_jax.launch import terminal",
            "launch/terminal": "",
        }
    )
    for rule in (badly_written, upward, cycles, jax_behind):
        assert list(rule(modules)) == []


@pytest.mark.parametrize("source", ["from . import kv", "from .kv import KVCache", "from models.kv import KVCache"])
def test_a_relative_import_or_one_through_a_link_is_seen(made, source):
    (found,) = badly_written(made({"models/llama": source, "models/kv": ""}))
    assert found.startswith("ca_jax.models.llama imports ")


@pytest.mark.parametrize(
    ("sources", "chain"),
    [
        ({"models/kv": "from ca_jax import transfer", "transfer": ""}, "ca_jax.models.kv -> ca_jax.device.transfer"),
        (
            {"transfer": "def f():\n  import ca_jax.device.runner", "runner": ""},
            "ca_jax.device.transfer -> ca_jax.device.runner",
        ),
        (
            {"runner": "try:\n  from ca_jax.engine import E\nfinally: x", "engine": ""},
            "ca_jax.device.runner -> ca_jax.engine",
        ),
        ({"engine": "from ca_jax.launch import chat", "launch/chat": ""}, "ca_jax.engine -> ca_jax.launch.chat"),
        ({"engine": "from ca_jax import Engine"}, "ca_jax.engine -> ca_jax"),
        (
            {"session_kv": "import ca_jax.serving.truncator", "truncator": ""},
            "ca_jax.kv.session_kv -> ca_jax.serving.truncator",
        ),
        (
            {"repair": "import ca_jax.serving.prefilling", "prefilling": ""},
            "ca_jax.recompute.repair -> ca_jax.serving.prefilling",
        ),
        (
            {"discarding": "import ca_jax.overflow.config", "overflow": ""},
            "ca_jax.overflow.discarding -> ca_jax.overflow.config",
        ),
        ({"engine": "import ca_jax.evaluation.a", "evaluation/a": ""}, "ca_jax.engine -> ca_jax.evaluation.a"),
        ({"evaluation/a": "import ca_jax.device.runner", "runner": ""}, "ca_jax.evaluation.a -> ca_jax.device.runner"),
        ({"evaluation/a": "from ca_jax import Engine"}, "ca_jax.evaluation.a -> ca_jax"),
        (
            {"evaluation/a": "import ca_jax.pretrained", "pretrained": "import ca_jax.engine", "engine": ""},
            "ca_jax.evaluation.a -> ca_jax.pretrained -> ca_jax.engine",
        ),
        ({"models/a": "import ca_jax.storage.b", "storage/b": ""}, "ca_jax.models.a -> ca_jax.storage.b"),
        ({"storage/b": "class B:\n  import ca_jax.models"}, "ca_jax.storage.b -> ca_jax.models"),
        (
            {"storage/b": "import ca_jax.config", "config": "from ca_jax.engine import E", "engine": ""},
            "ca_jax.storage.b -> ca_jax.config -> ca_jax.engine",
        ),
    ],
)
def test_an_import_the_wrong_way_is_seen(made, sources, chain):
    assert list(upward(made(sources))) == [chain]


def test_a_cycle_is_seen(made):
    modules = made(
        {"runner": "from ca_jax import blend", "blend": "import ca_jax.config", "config": "import ca_jax.device.runner"}
    )
    assert list(cycles(modules)) == [
        "ca_jax.recompute.blend -> ca_jax.config -> ca_jax.device.runner -> ca_jax.recompute.blend"
    ]


@pytest.mark.parametrize(
    ("sources", "chain"),
    [
        ({"scheduler": "import jax.numpy as jnp"}, "ca_jax.serving.scheduler -> jax.numpy"),
        (
            {"overflow": "from ca_jax.recompute.drift import D", "drift": "import jax"},
            "ca_jax.overflow.config -> ca_jax.recompute.drift -> jax",
        ),
        ({"session": "class A:\n  from flax import linen"}, "ca_jax.session -> flax.linen"),
        (
            {"traces/sharegpt": "try:\n  import orbax.checkpoint\nexcept E: pass"},
            "ca_jax.traces.sharegpt -> orbax.checkpoint",
        ),
        (
            {"costs": "from ca_jax.config import C", "config": "import ca_jax.models.kv", "models/kv": "import jax"},
            "ca_jax.kv.costs -> ca_jax.config -> ca_jax.models.kv -> jax",
        ),
        (
            {"costs": "import ca_jax.models.kv", "models/kv": "", "models/__init__": "import jax"},
            "ca_jax.kv.costs -> ca_jax.models -> jax",
        ),
    ],
)
def test_jax_behind_a_chain_of_imports_is_seen(made, sources, chain):
    assert list(jax_behind(made(sources))) == [chain]
