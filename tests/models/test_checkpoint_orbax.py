"""Checkpoints of the engine's own: what is written is what comes back, and damage is found."""

import json
import shutil

import orbax.checkpoint as ocp
import pytest

from ca_jax.errors import CheckpointError, UnsupportedArchitectureError
from ca_jax.launch.convert import convert
from ca_jax.models import orbax
from ca_jax.models.checkpoint import load_checkpoint
from ca_jax.models.config import RopeConfig
from ca_jax.testing import tiny

from .test_checkpoint_gguf import assert_same_params

CONFIG = tiny.tiny_config(
    num_layers=2, rope=RopeConfig(theta=5e5, scaling="llama3", factor=8.0, original_max_positions=64)
)


@pytest.fixture
def source(tmp_path):
    return tiny.write_tiny_hf(tmp_path / "tiny-llama", CONFIG, tiny.tiny_params(CONFIG))


@pytest.fixture
def converted(source, tmp_path):
    convert(str(source), tmp_path / "converted", "float32")
    return tmp_path / "converted"


@pytest.mark.parametrize(("dtype", "chunk_bytes"), [("float32", 4 << 20), ("bfloat16", 5000)])
def test_a_converted_model_is_the_same_model(source, tmp_path, monkeypatch, dtype, chunk_bytes):
    monkeypatch.setattr(orbax, "_CHUNK_BYTES", chunk_bytes)  # The fewer, the more rows are read by themselves.
    convert(str(source), tmp_path / "converted", dtype)
    original, loaded = (load_checkpoint(str(path), dtype=dtype) for path in (source, tmp_path / "converted"))
    assert loaded.config == CONFIG
    assert_same_params(loaded.params, original.params)
    assert loaded.fingerprint == original.fingerprint, "KV stored under one is good under the other"
    assert loaded.name == original.name
    assert loaded.stop_token_ids == original.stop_token_ids
    text = "<|im_start|>user\nGrüße!<|im_end|>"
    assert loaded.tokenizer.encode(text) == original.tokenizer.encode(text)
    assert loaded.tokenizer.bos_id == original.tokenizer.bos_id
    messages = [{"role": "user", "content": "hi"}]
    template = loaded.tokenizer.chat_template
    assert template.first_turn(messages) == original.tokenizer.chat_template.first_turn(messages)
    if dtype == "float32":
        narrow = load_checkpoint(str(tmp_path / "converted"), dtype="bfloat16")
        assert narrow.fingerprint != loaded.fingerprint
        assert_same_params(narrow.params, load_checkpoint(str(source), dtype="bfloat16").params)
        (source / "tokenizer.json").unlink()
        convert(str(source), tmp_path / "bare", dtype)
        assert load_checkpoint(str(tmp_path / "bare")).tokenizer is None


def test_a_converted_model_keeps_its_template_for_tools_and_its_tokens(source, tmp_path):
    (source / "chat_template.jinja").write_text("plain")
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools[0] }}{{ pad_token }}")
    options = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(options | {"pad_token": "a"}))
    convert(str(source), tmp_path / "converted", "float32")
    template = load_checkpoint(str(tmp_path / "converted")).tokenizer.chat_template
    assert template.first_turn([{"role": "user", "content": "Hi", "tools": ["clock"]}]) == "clocka"


def test_an_output_directory_in_use_is_left_alone(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"got thesis\.txt in"):
        convert(str(source), tmp_path / "out", "float32")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize("damage", ["a changed bit", "a truncated file"])
def test_damage_is_found(converted, damage):
    files = (path for path in (converted / "params").rglob("*") if path.is_file())
    path = max(files, key=lambda path: path.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content if damage == "a changed bit" else content[:-100])
    with pytest.raises(CheckpointError, match="converted: "):
        load_checkpoint(str(converted))


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        *((name, "converted.*: cannot be read") for name in ("params", "tokenizer.json")),
        ("params/params.layer_1.attn.wk", r"tensor layer_1/attn/wk is missing; its shape must be \(64, 2, 16\)"),
    ],
)
def test_a_missing_part_is_found(converted, missing, message):
    (converted / missing).rename(converted / "elsewhere")
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(str(converted))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"format": 2}, CheckpointError, "the format must be 1, got 2"),
        ({"mlp_dim": 256}, CheckpointError, r"mlp/w_gate: the shape must be \(64, 256\), got \(64, 128\)"),
        ({"architecture": "mpt"}, UnsupportedArchitectureError, "converted: architecture 'mpt' is not served: its pos"),
        ({"num_experts": 4, "num_experts_per_token": 2}, CheckpointError, "tensor layer_0/mlp/router is missing"),
        ({"qkv_bias": True}, CheckpointError, r"tensor layer_0/attn/bq is missing; its shape must be \(4, 16\)"),
        ({"tie_embeddings": True}, CheckpointError, "1 tensors belong to no parameter .*: head/kernel"),
    ],
)
def test_a_manifest_of_another_model_is_refused(converted, changes, error, message):
    manifest = json.loads((converted / orbax.MANIFEST).read_text())
    (manifest if "format" in changes else manifest["config"]).update(changes)
    (converted / orbax.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(error, match=message):
        load_checkpoint(str(converted))


def test_a_checkpoint_that_orbax_wrote_whole_is_read(converted, source):
    """As this engine wrote them before: all leaves in one OCDBT, each one chunk."""
    wanted = load_checkpoint(str(source)).params
    shutil.rmtree(converted / "params")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save((converted / "params").absolute(), wanted)
    manifest = json.loads((converted / orbax.MANIFEST).read_text())
    manifest["params_sha256"] = orbax._hash_params(converted)
    (converted / orbax.MANIFEST).write_text(json.dumps(manifest))
    assert_same_params(load_checkpoint(str(converted)).params, wanted)
