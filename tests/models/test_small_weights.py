"""Weights rounded to 8 or 4 bits: which, to what, and that a model with them computes with nothing else."""

import dataclasses

import gguf
import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import ca_jax
from benchmarks.main import model_loader
from ca_jax.models import cpu_kernels
from ca_jax.models.checkpoint import load_checkpoint
from ca_jax.models.config import RopeConfig
from ca_jax.models.small_weights import Int4Matrix, Int8Matrix, SmallMatrix, as_small, round_in_place
from ca_jax.models.weights import parameter_slots
from ca_jax.testing import tiny
from tests import adapters_kit as ak
from tests import engine_kit as kit
from tests import families_kit
from tests import overflow_kit as ok
from tests.tolerances import LOGITS_ATOL

from .test_checkpoint_quantized import awq, gptq

KINDS = gguf.GGMLQuantizationType
ROUNDED_TO = {"int8": KINDS.Q8_0, "int4": KINDS.Q4_1}
CASES = ("llama3_rope", "qwen2_moe", "deepseek_v3")  # A tied head; experts; latents of which some do not divide.


def rounded(rows, kind):
    return gguf.dequantize(gguf.quantize(np.ascontiguousarray(rows), kind), kind)


def by_slot(config, params):
    for slot in parameter_slots(config):
        leaf = params["params"]
        for key in slot.path:
            leaf = leaf[key]
        yield slot, np.asarray(leaf)


@pytest.mark.parametrize("weight_dtype", ROUNDED_TO)
@pytest.mark.parametrize("name", CASES)
def test_matrices_are_rounded_and_nothing_else(tmp_path, name, weight_dtype):
    families_kit.make(name, tmp_path)
    plain = load_checkpoint(str(tmp_path))
    model = ca_jax.load_model(str(tmp_path), dtype="float32", weight_dtype=weight_dtype)
    kind = ROUNDED_TO[weight_dtype]
    config, num_rounded = model.config, 0
    for (slot, before), (_, after) in zip(by_slot(config, plain.params), by_slot(config, model.params), strict=True):
        expected = before
        num_inputs = slot.stored_shape[-1]
        is_head = slot.key == "embed.embedding" and config.tie_embeddings
        if is_head:
            expected = rounded(before, KINDS.Q8_0)
        elif slot.transposed and not slot.key.endswith("router") and num_inputs % 32 == 0:
            stacked = before.reshape(slot.num_stacked or 1, num_inputs, -1)
            expected = np.stack([rounded(part.T, kind).T for part in stacked]).reshape(before.shape)
        num_rounded += not np.array_equal(expected, before)
        np.testing.assert_array_equal(after, expected, err_msg=slot.key)
    assert num_rounded > 4 * config.num_layers
    assert model.fingerprint != plain.fingerprint, "its KV is not the other's"


@pytest.mark.skipif(cpu_kernels.library() is None, reason="the package was built without its CPU kernels")
@pytest.mark.parametrize(("weight_dtype", "kind"), [("int8", "q8"), ("int4", "q4")])
def test_decoding_reads_so_few_bits_and_says_what_plain_arithmetic_does(tmp_path, weight_dtype, kind):
    config = tiny.tiny_config(embed_dim=64, mlp_dim=96, head_dim=16, num_heads=4)
    tiny.write_tiny_hf(tmp_path, config, tiny.tiny_params(config))
    model = ca_jax.load_model(str(tmp_path), dtype="float32", weight_dtype=weight_dtype)
    packed = cpu_kernels.pack_params(config, model.params["params"])
    sizes = {leaf.nbytes for leaf in jax.tree.leaves(packed["layer_0"]["mlp"]["down"])}
    assert sizes == {96 * 64 // 512 * cpu_kernels.KINDS[kind]}
    with kit.small_engine(model, weight_dtype=weight_dtype) as engine:
        ids = kit.prompt(20)
        assert kit.say(engine.session(), ids) == kit.greedy_answer(ids, 12, model)


def test_benchmarks_load_what_their_flag_says(tmp_path):
    config = tiny.tiny_config()
    tiny.write_tiny_hf(tmp_path, config, tiny.tiny_params(config))
    loaded = model_loader(str(tmp_path), None, dtype="float32", weight_dtype="int8", seed=0)(lambda *_: None)
    assert loaded.fingerprint == ca_jax.load_model(str(tmp_path), dtype="float32", weight_dtype="int8").fingerprint


def test_an_engine_that_wants_them_takes_no_others():
    with pytest.raises(
        ValueError, match="weight_dtype of the loaded model must be int8, as the config says, got 'model'"
    ):
        kit.small_engine(kit.tiny_model(), weight_dtype="int8")


def test_another_kind_of_weights_is_refused(tmp_path):
    config = tiny.tiny_config()
    tiny.write_tiny_hf(tmp_path, config, tiny.tiny_params(config))
    with pytest.raises(ValueError, match="weight_dtype must be model or int8 or int4, got 'int2'"):
        ca_jax.load_model(str(tmp_path), weight_dtype="int2")


# In bfloat16, held in 4 bits.


def matrix_of(kind: KINDS, num_outputs: int = 300) -> np.ndarray:
    """`[inputs, outputs]`, as a file of that kind has it."""
    rows = np.random.default_rng(3).standard_normal((num_outputs, 160)).astype(np.float32)
    return rounded(rows, kind).T


SLOT = next(slot for slot in parameter_slots(tiny.tiny_config(embed_dim=160, mlp_dim=300)) if slot.key == "mlp.w_up")
WIDER = dataclasses.replace(SLOT, shape=(160, 304))


@pytest.mark.parametrize("kind", [KINDS.Q4_0, KINDS.Q4_1])
def test_what_a_file_had_in_4_bits_is_kept_to_a_64th(kind):
    """Of the largest of each group: weights, their scale and their offset are rounded to bfloat16. Half a step of 15 is
    a sixteenth."""
    leaf = matrix_of(kind)
    held = as_small(SLOT, leaf.astype(ml_dtypes.bfloat16), Int4Matrix)
    most = np.abs(leaf.reshape(5, 32, -1)).max(1).repeat(32, 0)
    assert (np.abs(kit.in_float32(held) - leaf) <= most / 64).all()


@pytest.mark.parametrize("group_size", [32, 160])
@pytest.mark.parametrize("method", [gptq, awq])
def test_what_a_checkpoint_had_in_4_bits_is_kept_as_well(method, group_size):
    """Its groups are of any multiple of 32; of one of ours the least and the largest code need not be 0 and 15."""
    write, _ = method(group_size=group_size)
    leaf = write(np.random.default_rng(5), 304, 160)[1].T.astype(np.float32)
    held = as_small(WIDER, leaf.astype(ml_dtypes.bfloat16), Int4Matrix)
    most = np.abs(leaf.reshape(5, 32, -1)).max(1).repeat(32, 0)
    assert (np.abs(kit.in_float32(held) - leaf) <= most / 64).all()


@pytest.mark.parametrize("kind", [KINDS.Q4_0, KINDS.Q4_1])
def test_what_a_file_had_in_4_bits_stays_as_it_is_in_float32(kind):
    leaf = np.ascontiguousarray(matrix_of(kind))
    np.testing.assert_array_equal(round_in_place(tiny.tiny_config(), SLOT, leaf.copy(), "int4"), leaf)


def test_other_weights_are_within_half_a_step_of_15():
    leaf = np.random.default_rng(4).standard_normal((160, 300)).astype(np.float32)
    leaf[:32, 0], leaf[:32, 1] = 0, 7.0  # Groups without a step.
    held = as_small(SLOT, leaf, Int4Matrix)
    assert [each.dtype for each in held] == [np.uint8, ml_dtypes.bfloat16, ml_dtypes.bfloat16]
    groups = leaf.reshape(5, 32, -1)
    step = ((groups.max(1) - groups.min(1)) / 15).repeat(32, 0)
    slack = 2**-8 * np.abs(groups).max(1).repeat(32, 0)
    assert (np.abs(kit.in_float32(held) - leaf) <= step / 2 + slack).all()


@pytest.mark.parametrize("name", ["qwen2_moe", "gemma3", "deepseek_v3"])
def test_of_a_loaded_model_groups_are_in_4_bits_and_the_rest_in_8(tmp_path, name):
    families_kit.make(name, tmp_path)
    plain = load_checkpoint(str(tmp_path), dtype="bfloat16")
    model = ca_jax.load_model(str(tmp_path), dtype="bfloat16", weight_dtype="int4")
    eight = ca_jax.load_model(str(tmp_path), dtype="bfloat16", weight_dtype="int8")
    assert len({each.fingerprint for each in (plain, model, eight)}) == 3
    forms = {Int4Matrix: 0, Int8Matrix: 0}
    for slot in parameter_slots(model.config):
        before, leaf, other = (leaf_of(each.params, slot) for each in (plain, model, eight))
        assert isinstance(leaf, SmallMatrix) == isinstance(other, SmallMatrix)
        if isinstance(leaf, Int4Matrix):
            has_groups = slot.shape[int(slot.num_stacked is not None) + slot.num_inputs - 1] % 32 == 0
            assert has_groups
            wanted = as_small(slot, np.asarray(before), Int4Matrix)
            jax.tree.map(np.testing.assert_array_equal, leaf, wanted)
        elif isinstance(leaf, Int8Matrix):
            jax.tree.map(np.testing.assert_array_equal, leaf, other)
        if isinstance(leaf, SmallMatrix):
            forms[type(leaf)] += 1
    assert forms[Int4Matrix] > 2 * model.config.num_layers
    assert forms[Int8Matrix] > 0
    ids = families_kit.prompt(40)
    found = kit.wide_but_small(model).logits(ids)
    expected = kit.spelled_out(model).logits(ids)
    np.testing.assert_allclose(found, expected, rtol=0, atol=LOGITS_ATOL["float32"])


# In bfloat16, held in 8 bits.

BLOCKS = {
    **{"qwen2_moe": ("experts", "shared"), "gpt_oss": ("experts",), "gemma3": ("mlp",), "neox": ("mlp",)},
    **{"deepseek_v3": ("mlp", "experts", "shared"), "kimi_linear": ("mlp", "experts", "shared"), "cohere2": ("mlp",)},
}
"""Feed-forward blocks that families have."""


def leaf_of(params, slot):
    leaf = params["params"]
    for key in slot.path:
        leaf = leaf[key]
    return leaf


def in_float32(params):
    """What is held in 8 bits stays so; all else is float32."""
    return jax.tree.map(lambda leaf: leaf if leaf.dtype == np.int8 else leaf.astype(np.float32), params)


@pytest.mark.parametrize("name", BLOCKS)
def test_what_is_held_in_8_bits_is_within_half_a_step_and_the_model_computes_with_it(tmp_path, name):
    families_kit.make(name, tmp_path)
    plain = load_checkpoint(str(tmp_path), dtype="bfloat16")
    model = ca_jax.load_model(str(tmp_path), dtype="bfloat16", weight_dtype="int8")
    held = set()
    for slot in parameter_slots(model.config):
        before, leaf = np.asarray(leaf_of(plain.params, slot), np.float32), leaf_of(model.params, slot)
        if not isinstance(leaf, Int8Matrix):
            np.testing.assert_array_equal(np.asarray(leaf, np.float32), before, err_msg=slot.key)
            continue
        held.add(slot.key)
        assert leaf.numbers.dtype == np.int8
        numbers, scales = np.asarray(leaf.numbers, np.float32), np.asarray(leaf.scales)
        inputs = kit.inputs_of(slot)
        np.testing.assert_array_equal(np.abs(numbers).max(inputs), 127)
        scales = np.expand_dims(scales, inputs)
        assert (np.abs(numbers * scales - before) <= scales / 2 + 1e-6).all()
    blocks = {f"{block}.w_{name}" for block in BLOCKS[name] for name in ("gate", "up", "down")}
    assert {key for key in held if ".w_" in key} == blocks - ({"mlp.w_gate"} if name == "neox" else set())
    latents = {"deepseek_v3": {"wq_a", "wq", "wkv_a", "wo"}, "kimi_linear": {"wq", "wkv_a", "wo"}}.get(name)
    if latents is not None:  # What makes each head's keys and values of them stays as it is.
        assert {key.removeprefix("attn.") for key in held if key.startswith("attn.")} == latents
    assert "attn.wo" in held
    assert ("head.kernel" in held) == (not model.config.tie_embeddings)
    assert ("embed.embedding" in held) == model.config.tie_embeddings
    assert model.fingerprint != plain.fingerprint
    ids = families_kit.prompt(40)
    expected = kit.spelled_out(model).logits(ids)
    found = dataclasses.replace(model, params=in_float32(model.params)).logits(ids)
    np.testing.assert_allclose(found, expected, rtol=0, atol=LOGITS_ATOL["float32"])


def test_an_engine_serves_what_is_held_in_8_bits(tmp_path):
    config = tiny.tiny_config(embed_dim=64, mlp_dim=96, head_dim=16, num_heads=4)
    tiny.write_tiny_hf(tmp_path, config, tiny.tiny_params(config))
    wide, small = (ca_jax.load_model(str(tmp_path), dtype="bfloat16", weight_dtype=each) for each in ("model", "int8"))
    layers = [sum(leaf.nbytes for leaf in jax.tree.leaves(each.params["params"]["layer_0"])) for each in (wide, small)]
    assert layers[1] < 0.55 * layers[0]
    small = dataclasses.replace(
        small, params=in_float32(small.params)
    )  # So that tokens are the same whatever is packed.
    with kit.small_engine(small, weight_dtype="int8") as engine:
        session = engine.session()
        for seed in range(3):
            assert kit.say(session, kit.prompt(20, seed))
            kit.expect_right(session, model=small)
        assert session.usage.num_cached_tokens > 0


EXPERTS = {"num_experts": 5, "num_experts_per_token": 2}
LATENT = {"num_kv_heads": 1, "head_dim": 28, "latent_dim": 20, "nope_dim": 12, "value_dim": 10, "query_rank": 24}
SERVED = {
    "tied": {"tie_embeddings": True, "embed_scale": 3.0},
    "latents": {**LATENT, "rope": RopeConfig(rotary_dim=8)},
    "experts": EXPERTS,
    "experts with biases": {**EXPERTS, "mlp": "swiglu_clipped", "mlp_bias": True, "router_bias": True},
}


@pytest.mark.parametrize("weight_dtype", ROUNDED_TO)
@pytest.mark.parametrize("changes", SERVED.values(), ids=SERVED)
def test_an_engine_with_it_answers_as_the_same_numbers_in_float32(changes, weight_dtype):
    small = kit.held_small(kit.model_of(**changes), weight_dtype)
    wide = kit.spelled_out(small)
    with kit.small_engine(small, weight_dtype=weight_dtype) as engine:
        session = engine.session()
        for seed, num_tokens in enumerate((90, 20, 7)):
            assert kit.say(session, kit.prompt(num_tokens, seed))
            kit.expect_right(session, model=wide)
        assert session.usage.num_cached_tokens > 0


@pytest.mark.parametrize("weight_dtype", ROUNDED_TO)
@pytest.mark.parametrize("lora", [ak.FIRST, ak.SECOND], ids=["a", "b"])
def test_adapters_add_to_it_as_to_the_same_numbers_in_float32(tmp_path, lora, weight_dtype):
    """Held against the adapter merged into these numbers; the two differ by what they round, and by nothing else."""
    small = kit.held_small(ak.model_of(None), weight_dtype)
    base = tiny.hf_tensors(small.config, jax.tree.map(np.asarray, kit.spelled_out(small).params))
    tiny.write_tiny_hf(tmp_path, small.config, ak.base_params())
    safetensors.numpy.save_file(
        ak.merged_tensors(lora, base), tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    merged = ca_jax.load_model(str(tmp_path), dtype="float32")
    with kit.small_engine(small, weight_dtype=weight_dtype, max_adapters=3, max_adapter_rank=6) as engine:
        for name, each in zip("ab", (ak.FIRST, ak.SECOND), strict=True):
            engine.load_adapter(name, ak.written(each))
        session, ids = engine.session(adapter="a" if lora is ak.FIRST else "b"), kit.prompt(40)
        with ok.recorded_logits(engine) as logits:
            answer = kit.say(session, ids, 6)
        expected = merged.logits([*ids, *answer])[len(ids) - 1 : -1]
        np.testing.assert_allclose(np.stack(logits), expected, rtol=0, atol=LOGITS_ATOL["float32"])
        kit.expect_right(session, model=merged)
