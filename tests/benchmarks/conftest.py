"""What the benchmarks' tests share: a tiny model, and a disk whose page cache can be emptied."""

import dataclasses

import pytest

import benchmarks.suites
from ca_jax.pretrained import LoadedModel, load_model
from tests.launch.conftest import tiny_model

__all__ = ["tiny_model"]

pytest.register_assert_rewrite("tests.benchmarks.suite_checks")
benchmarks.suites.load()


@pytest.fixture(scope="session")
def model(tiny_model) -> LoadedModel:
    return load_model(str(tiny_model), dtype="float32")


@pytest.fixture(scope="session")
def wordless(model) -> LoadedModel:
    """The same without a tokenizer: what is said to it is random tokens."""
    return dataclasses.replace(model, tokenizer=None)
