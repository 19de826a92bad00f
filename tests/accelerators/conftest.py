"""What tests of compiled steps leave: the figures of each, for results/accelerators.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--figures_out", type=Path, help="where the figures of all steps go, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    if path := config.getoption("--figures_out", default=None):
        config.pluginmanager.register(_Recorder(path))


class _Recorder:
    """Collects what tests record as their properties: of all of them anew, or of some in place of what was there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, dict[str, Any]] = {}
        self._is_part = False

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        self._is_part = self._is_part or bool(items)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            for name, value in report.user_properties:
                key = ", ".join(value[part] for part in ("setup", "step", "chip") if part in value)
                self._found.setdefault(name, {})[key] = value

    def pytest_sessionfinish(self) -> None:
        if not self._found:  # No test ran: a wrong expression, say.
            return
        kept = json.loads(self._path.read_text(encoding="utf-8")) if self._is_part and self._path.exists() else {}
        every = {name: {**kept.get(name, {}), **of_name} for name, of_name in self._found.items()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(_as_text({**kept, **every}), encoding="utf-8")


def _as_text(found: dict[str, dict[str, Any]]) -> str:
    """JSON with a line for each row."""
    tables = []
    for name, rows in found.items():
        lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(row)}" for key, row in rows.items())
        tables.append(f" {json.dumps(name)}: {{\n{lines}\n }}")
    return "{\n" + ",\n".join(tables) + "\n}\n"
