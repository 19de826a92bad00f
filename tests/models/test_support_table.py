"""The table of architectures in docs/models.md: every family has a row, and every tick a test that runs that family."""

import re
from pathlib import Path

import pytest

from ca_jax.models.families import FAMILIES
from tests import families_kit, families_on_mesh, test_engine_families
from tests.models import test_gguf_families

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "models.md").read_text(encoding="utf-8")
COLUMNS = ("parity", "reuse", "overflow", "sharded", "GGUF", "safetensors")


def tables():
    """Every table of the page: rows of cells, the header first."""
    for lines in re.findall(r"(?:^\|.*\|\n)+", PAGE, flags=re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines.splitlines()]
        yield [rows[0], *rows[2:]]


def table(first_cell):
    """The rows of the one table whose header starts so, by column."""
    ((header, *rows),) = [rows for rows in tables() if rows[0][0] == first_cell]
    return [dict(zip(header, row, strict=True)) for row in rows]


def families_of(cases):
    """The families that some cases of `families_kit` are of."""
    kinds = {f"{families_kit.CASES[name][0]}ForCausalLM" for name in cases}
    return {name for name, family in FAMILIES.items() if kinds & {*family.architectures}}


RUN = {
    "test_logits_and_greedy_tokens_equal_those_of_transformers": families_of(families_kit.CASES),
    "test_three_turns_three_overflows_and_a_restart": families_of(test_engine_families.NAMES),
    "test_every_family_on_a_mesh": {name.split("-")[0] for name in families_on_mesh.FAMILIES},
    "test_logits_and_greedy_tokens_equal_those_of_llama_cpp": families_of(test_gguf_families.METADATA),
}
"""Which families each test runs."""


def test_every_family_has_its_row():
    assert [row["architecture"].strip("`") for row in table("architecture")] == list(FAMILIES)


@pytest.mark.parametrize("column", COLUMNS)
def test_every_tick_has_its_test(column):
    ticked = {row["architecture"].strip("`") for row in table("architecture") if "✓" in row[column]}
    (test,) = [row["test"].strip("`") for row in table("column") if column in row["column"].split(", ")]
    path, name = test.split("::")
    assert f"def {name}(" in (REPOSITORY / path).read_text(encoding="utf-8")
    assert ticked <= RUN[name]
