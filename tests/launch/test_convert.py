"""The command that converts checkpoints, and its dry run: what it prints, writes and refuses."""

import re
from pathlib import Path

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from ca_jax.errors import UnsupportedQuantizationError
from ca_jax.launch import convert
from ca_jax.models import orbax
from ca_jax.models.checkpoint import load_checkpoint
from ca_jax.testing import tiny
from tests import gguf_kit
from tests.models.test_checkpoint_gguf import assert_same_params
from tests.scripts_kit import run_script

DATA = Path(__file__).parents[1] / "data"
CONFIG = tiny.tiny_config(num_layers=2)


@pytest.fixture
def source(tmp_path):
    return tiny.write_tiny_hf(tmp_path / "tiny-llama", CONFIG, tiny.tiny_params(CONFIG))


def cells(text, row):
    """The cells of the table's row that begins so."""
    return re.split(r"\s{2,}", next(line.strip() for line in text.splitlines() if line.strip().startswith(row)))


def number(text, row):
    return int(cells(text, row)[1].replace(",", ""))


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_a_model_is_converted_and_orbax_itself_reads_it(source, tmp_path, kind):
    if kind == "gguf":
        source = gguf_kit.write_tiny(tmp_path / "tiny.gguf", CONFIG)
    done = run_script("convert", f"--model={source}", f"--output_dir={tmp_path / 'out'}", "--dtype=bfloat16")
    assert done.code == 0, done.err
    assert f"(bfloat16) -> {tmp_path}" in done.err.replace("\n", "")
    with ocp.StandardCheckpointer() as checkpointer:
        restored = checkpointer.restore((tmp_path / "out" / "params").absolute())
    restored = jax.tree.map(np.asarray, restored)
    assert_same_params(restored, load_checkpoint(str(source), dtype="bfloat16").params)
    assert (tmp_path / "out" / orbax.MANIFEST).is_file()


def test_a_source_that_cannot_be_read_leaves_nothing_behind(tmp_path, monkeypatch):
    source = gguf_kit.write_tiny(tmp_path / "tiny.gguf", CONFIG)

    def refuse(*_):
        raise NotImplementedError

    monkeypatch.setattr("gguf.dequantize", refuse)
    with pytest.raises(UnsupportedQuantizationError, match="cannot be dequantised"):
        convert.convert(str(source), tmp_path / "out", "float32")
    assert list((tmp_path / "out").iterdir()) == []
    monkeypatch.undo()
    convert.convert(str(source), tmp_path / "out", "float32")
    assert load_checkpoint(str(tmp_path / "out")).config == CONFIG


def test_a_dry_run_prints_bytes_and_sessions(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    flags = ("--model_preset=llama2-70b", "--tensor_parallel_size=4", "--dram_gib=128", "--ssd_gib=10240")
    text = run_script("convert", "--dry_run", *flags).out
    assert "llama2-70b in bfloat16: 138.0 GB of weights, 0.31 MiB of KV a token; 4 devices of 80.0 GiB" in text
    parts = ["weights", "pool of KV", "read buffer", "write buffer", "left"]
    assert sum(number(text, part) for part in parts) == 80 << 30
    assert number(text, "weights") == 34_490_302_464
    assert "sessions of 4,096 tokens" in text
    token = 2 * 80 * 8 * 128 * 2
    assert cells(text, "DRAM") == ["DRAM", "128.0", f"{(128 << 30) // (128 * token) * 128:,}", "102"]
    assert cells(text, "SSD")[1] == "10240.0"


@pytest.mark.parametrize("name", sorted(path.parent.name for path in DATA.glob("*/model.safetensors")))
def test_every_family_comes_through(tmp_path, name):
    convert.convert(str(DATA / name), tmp_path / "out", "float32")
    wanted, found = load_checkpoint(str(DATA / name)), load_checkpoint(str(tmp_path / "out"))
    assert found.config == wanted.config
    assert found.fingerprint == wanted.fingerprint
    assert_same_params(found.params, wanted.params)
