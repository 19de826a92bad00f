"""What the documents tell a reader to open, import or type is there."""

import ast
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import ca_jax
from ca_jax.__main__ import COMMANDS

REPOSITORY = Path(__file__).resolve().parents[1]
TOP = [REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "WORKSPACE.md")]
PAGES = [*TOP[:2], *sorted((REPOSITORY / "docs").rglob("*.md"))]
SCRIPTS = [*sorted((REPOSITORY / "docs").rglob("*.ipynb")), *sorted((REPOSITORY / "examples").glob("*.py"))]
OURS = ("ca_jax", "benchmarks")
COMMAND = re.compile(r"(?:^|[\s`/])(?:ca_jax|python -m ca_jax\.launch\.)\.?\s?([a-z_]+)((?: [^`\n|&#]*)?)")


def blocks(page, language):
    """Fenced blocks of a language, those of tabs without their indent, a line that ends with \\ joined to the next."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    for indent, body in re.findall(rf"^( *)```{language}\n(.*?)^ *```", text, flags=re.MULTILINE | re.DOTALL):
        yield re.sub(rf"^{indent}", "", body, flags=re.MULTILINE)


def commands(page):
    """Subcommands and the names of their flags, as a page has them in its shell blocks."""
    for block in blocks(page, "bash"):
        for line in block.splitlines():
            for name, rest in COMMAND.findall(line.partition(" #")[0]):
                yield name, re.findall(r"--([a-z_]+)", rest)


def name_of(page):
    return page.relative_to(REPOSITORY).as_posix()


@pytest.mark.parametrize("page", TOP, ids=name_of)
def test_links_of_pages_outside_the_site_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    assert [link for link in links if "://" not in link and not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_python_in_pages_is_python_and_names_what_is_public(page):
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "ca_jax":
                assert node.attr in ca_jax.__all__ or node.attr == "models", f"ca_jax.{node.attr} in\n{block}"


def code_of(path):
    """The Python of a script, or of a notebook's cells without their magic lines."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return text
    cells = (cell["source"] for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
    return "\n".join(line for cell in cells for line in "".join(cell).splitlines() if not line.startswith("%"))


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_what_notebooks_and_examples_use_of_our_modules_is_there(path):
    tree, names = ast.parse(code_of(path)), {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in OURS:
            exec(compile(ast.Module([node], []), str(path), "exec"), names)
    used = ((names.get(node.value.id), node.attr) for node in ast.walk(tree) if is_attribute_of_name(node))
    modules = ((owner, name) for owner, name in used if isinstance(owner, types.ModuleType))
    assert [f"{owner.__name__}.{name}" for owner, name in modules if not hasattr(owner, name)] == []


def is_attribute_of_name(node):
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)


@pytest.mark.parametrize("page", [*TOP[2:], *PAGES], ids=name_of)
def test_tests_and_scripts_that_pages_name_exist(page):
    named = re.findall(r"`((?:tests|tools|examples|docs)/[\w/.*-]*)", page.read_text(encoding="utf-8"))
    assert [path for path in named if not any(REPOSITORY.glob(path.rstrip("/")))] == []


def test_every_public_name_has_its_place_in_the_reference():
    pages = (REPOSITORY / "docs" / "reference").glob("*.md")
    named = {name for page in pages for name in re.findall(r"^::: ca_jax.*\.(\w+)$", page.read_text(), re.MULTILINE)}
    assert set(ca_jax.__all__) <= named


def test_commands_that_pages_name_exist():
    named = {name for page in PAGES for name, _ in commands(page)}
    assert {"serve", "chat", "store", "plan", "replay", "simulate", "evaluate"} <= named
    assert named <= COMMANDS.keys()


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_flags_that_pages_name_exist(name):
    named = {flag for page in PAGES for command, flags in commands(page) if command == name for flag in flags}
    if named:
        help_text = subprocess.run(
            [sys.executable, "-m", f"ca_jax.launch.{name}", "--helpfull"], capture_output=True, text=True, check=False
        ).stdout
        known = set(re.findall(r"^\s+(?:-\w,)?--(?:\[no\])?(\w+)", help_text, flags=re.MULTILINE))
        assert named - known - {"help"} == set()
