"""Tests marked `gpu` are skipped where jax finds none; all others here run on whatever it finds."""

import jax
import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and jax.default_backend() != "gpu":
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="wants a GPU, which jax does not find"))


@pytest.fixture
def on_gpu() -> bool:
    """Whether what only a GPU has can be asserted."""
    return jax.default_backend() == "gpu"
