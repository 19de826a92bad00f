"""Drift as a file and as a sum: what comes back, what is refused, which tokens it is added to."""

import dataclasses
import zipfile

import jax.numpy as jnp
import numpy as np
import pytest

from ca_jax.recompute.drift import Drift, add_drift
from ca_jax.testing.tiny import tiny_config

CONFIG = tiny_config()
SHAPE = (CONFIG.num_layers, 2, CONFIG.num_kv_heads, CONFIG.head_dim)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape).astype(np.float32)


def a_drift(**changes: object) -> Drift:
    values = {"values": normal(*SHAPE), "fingerprint": "f" * 64, "window": 512, "truncation_ratio": 0.25}
    return Drift(**{**values, "num_tokens": 1234, **changes})


def as_saved(drift: Drift) -> dict[str, object]:
    return dataclasses.asdict(drift)


@pytest.mark.parametrize("name", ["drift.npz", "drift", "drift.of.a.model"])
def test_it_comes_back_as_it_was_from_the_file_that_was_named(tmp_path, name):
    drift = a_drift()
    drift.save(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    found = Drift.load(str(tmp_path / name))
    assert found.values.dtype == np.float32
    np.testing.assert_array_equal(found.values, drift.values)
    rest = {field: value for field, value in as_saved(drift).items() if field != "values"}
    assert {field: value for field, value in as_saved(found).items() if field != "values"} == rest
    assert {field: type(value) for field, value in rest.items()} == {
        field: type(getattr(found, field)) for field in rest
    }


def test_a_home_directory_may_be_named(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    a_drift().save("~/drift.npz")
    assert Drift.load("~/drift.npz").window == 512
    assert (tmp_path / "drift.npz").is_file()


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"none\.npz"):
        Drift.load(tmp_path / "none.npz")


def write_bytes(content: bytes):
    return lambda path: path.write_bytes(content)


def write_cut(path):
    a_drift().save(path)
    path.write_bytes(path.read_bytes()[:-200])


def write_damaged(path):
    """The sums of a zip file say that this is not what was written."""
    a_drift().save(path)
    content = bytearray(path.read_bytes())
    content[300] ^= 0xFF
    path.write_bytes(content)


def write_changed(**changes):
    def write(path):
        with path.open("wb") as file:
            np.savez(file, **{**as_saved(a_drift()), **changes})

    return write


def write_without(field):
    def write(path):
        with path.open("wb") as file:
            np.savez(file, **{name: value for name, value in as_saved(a_drift()).items() if name != field})

    return write


def write_npy(path):
    with path.open("wb") as file:
        np.save(file, normal(*SHAPE))


def write_zip(path):
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("values.npy", b"no array")


WRONG = {
    "empty": write_bytes(b""),
    "text": write_bytes(b"drift\n"),
    "begins like a zip": write_bytes(b"PK\x03\x04" + bytes(100)),
    "cut short": write_cut,
    "damaged": write_damaged,
    "an array alone": write_npy,
    "a zip of others": write_zip,
    "a directory": lambda path: path.mkdir(),
    **{f"without {field}": write_without(field) for field in as_saved(a_drift())},
    "objects": write_changed(values=np.array([None, "a"], object)),
    "words": write_changed(values=np.full(SHAPE, "a")),
    "another shape": write_changed(values=normal(3, 4)),
    "keys alone": write_changed(values=normal(3, 1, 2, 4)),
    "no numbers": write_changed(values=np.full(SHAPE, np.nan)),
    "many windows": write_changed(window=np.array([1, 2])),
    "a window in words": write_changed(window="wide"),
}


@pytest.mark.parametrize("write", WRONG.values(), ids=WRONG)
def test_other_files_are_refused_by_name(tmp_path, write):
    write(tmp_path / "other.npz")
    with pytest.raises(ValueError, match=r"the file must be of drift, got .*other\.npz"):
        Drift.load(tmp_path / "other.npz")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (normal(2, 2, 3), r"drift must be numbers \[L, 2, K, H\], got float32\[2, 2, 3\]"),
        (normal(3, 3, 2, 4), r"got float32\[3, 3, 2, 4\]"),
        (np.full(SHAPE, np.inf, np.float32), "drift must be numbers"),
    ],
)
def test_what_is_no_drift_is_refused(values, message):
    with pytest.raises(ValueError, match=message):
        a_drift(values=values)


def test_the_drift_of_another_model_is_refused():
    drift = a_drift()
    drift.check_model(CONFIG, "f" * 64)
    with pytest.raises(ValueError, match=r"drift must be \[3, 2, 2, 16\] of the model .* eeeeeeeeeeee, got .* of ffff"):
        drift.check_model(CONFIG, "e" * 64)
    for field in ("num_layers", "num_kv_heads", "head_dim"):
        other = dataclasses.replace(CONFIG, **{field: 4})
        with pytest.raises(ValueError, match=r"got \[3, 2, 2, 16\] of ffffffffffff"):
            drift.check_model(other, "f" * 64)


@pytest.mark.parametrize(("start", "stop"), [(0, 6), (2, 5), (0, 0), (3, 3), (5, 2), (4, 9)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_added_to_the_tokens_of_its_span(start, stop, dtype):
    kv, drift = jnp.asarray(normal(2, 6, 3, 4), dtype), normal(2, 3, 4)
    found = add_drift(kv, jnp.asarray(drift), jnp.int32(start), jnp.int32(stop))
    expected = np.asarray(kv, np.float32).copy()
    rounded = np.asarray(jnp.asarray(drift, dtype), np.float32)
    expected[:, start:stop] += rounded[:, None]
    assert found.dtype == kv.dtype
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(jnp.asarray(expected, dtype), np.float32))


def test_what_is_behind_the_tokens_stays_even_if_it_is_no_number():
    kv = normal(2, 6, 3, 4)
    kv[:, 4:] = np.nan
    found = add_drift(jnp.asarray(kv), jnp.ones((2, 3, 4)), jnp.int32(1), jnp.int32(4))
    np.testing.assert_array_equal(np.asarray(found)[:, [0, 4, 5]], kv[:, [0, 4, 5]])
