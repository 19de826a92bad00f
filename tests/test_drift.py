"""Drift as a file: what comes back, and what is refused."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from ca_jax.recompute.drift import Drift
from ca_jax.testing.tiny import tiny_config

CONFIG = tiny_config()
SHAPE = (CONFIG.num_layers, 2, CONFIG.num_kv_heads, CONFIG.head_dim)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def a_drift(**changes: object) -> Drift:
    values = {"values": normal(*SHAPE), "fingerprint": "f" * 64, "window": 512, "truncation_ratio": 0.25}
    return Drift(**{**values, "num_tokens": 1234, **changes})


@pytest.mark.parametrize("name", ["drift.npz", "drift.of.a.model"])
def test_it_comes_back_as_it_was_from_the_file_that_was_named(tmp_path, name):
    drift = a_drift()
    drift.save(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    found = Drift.load(str(tmp_path / name))
    assert found.values[0].dtype == np.float32
    np.testing.assert_array_equal(found.values, drift.values)
    for field, value in dataclasses.asdict(drift).items():
        if field != "values":
            assert (getattr(found, field), type(getattr(found, field))) == (value, type(value))


def saved(path: Path) -> bytes:
    a_drift().save(path)
    return path.read_bytes()


def with_bit_turned(path: Path) -> bytes:
    """The sums of a zip file say that this is not what was written."""
    content = bytearray(saved(path))
    content[300] ^= 0xFF
    return bytes(content)


def arrays(**changes: object):
    """Such a file, but for some fields; without those that are None."""
    fields = {**dataclasses.asdict(a_drift()), **changes}
    return lambda path: np.savez(path, **{name: value for name, value in fields.items() if value is not None})


WRONG = {
    "text": lambda path: b"drift\n",
    "cut short": lambda path: saved(path)[:-200],
    "damaged": with_bit_turned,
    "an array alone": lambda path: np.save(path.open("wb"), normal(*SHAPE)),
    "a directory": lambda path: path.mkdir(),
    "without a window": arrays(window=None),
    "objects": arrays(values=np.array([None, "a"], object)),
    "another shape": arrays(values=normal(3, 4)),
    "keys alone": arrays(values=normal(3, 1, 2, 4)),
    "no numbers": arrays(values=np.full(SHAPE, np.nan)),
    "a window in words": arrays(window="wide"),
}


@pytest.mark.parametrize("write", WRONG.values(), ids=WRONG)
def test_other_files_are_refused_by_name(tmp_path, write):
    path = tmp_path / "other.npz"
    content = write(path)
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"other\.npz"):
        Drift.load(path)


def test_the_drift_of_another_model_is_refused():
    drift = a_drift()
    drift.check_model(CONFIG, "f" * 64)
    with pytest.raises(ValueError, match=r"drift must be \[3, 2, 2, 16\] of the model .* eeeeeeeeeeee, got .* of ffff"):
        drift.check_model(CONFIG, "e" * 64)
    for field in ("num_layers", "num_kv_heads", "head_dim"):
        other = dataclasses.replace(CONFIG, **{field: 4})
        with pytest.raises(ValueError, match=r"got \[3, 2, 2, 16\] of ffffffffffff"):
            drift.check_model(other, "f" * 64)
