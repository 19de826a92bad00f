"""What tests of compiled steps leave: the figures of each, for results/accelerators.json."""

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
    """Collects what tests record as their properties."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, Any] = {"versions": {}, "step": [], "fit": [], "unfit": []}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            for name, value in report.user_properties:
                if name == "versions":
                    self._found[name].update(value)
                else:
                    self._found[name].append(value)

    def pytest_sessionfinish(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._found, indent=1) + "\n", encoding="utf-8")
