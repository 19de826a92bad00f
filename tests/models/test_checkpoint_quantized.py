"""Quantised Hugging Face directories, each against the plain one of the same numbers, and what of them is refused."""

import json
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from ca_jax.errors import CheckpointError, UnsupportedQuantizationError
from ca_jax.models import huggingface, quantized, weights
from ca_jax.models.checkpoint import load_checkpoint
from ca_jax.models.quantization_scheme import Scheme, scheme_from_hf
from ca_jax.testing import tiny

from .test_checkpoint_gguf import assert_same_params
from .test_checkpoint_huggingface import rewrite, rewrite_tensors

CONFIG = tiny.tiny_config(num_layers=2)
PARAMS = tiny.tiny_params(CONFIG)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Q_PROJ = "model.layers.0.self_attn.q_proj"
LEFT_OUT = "model.layers.1.mlp.down_proj.weight"  # Every checkpoint here has it plain.


def pack(codes, bits, order=None):
    """i32 words of codes along the last axis, put in one by one, the first in the lowest bits."""
    per_word = 32 // bits
    order = order or range(per_word)
    words = np.zeros((len(codes), codes.shape[1] // per_word), np.int64)
    for row, word, place in np.ndindex(*words.shape, per_word):
        words[row, word] |= int(codes[row, word * per_word + order[place]]) << (bits * place)
    return words.astype(np.uint32).view(np.int32)


# Each writer is given the shape of a weight and gives its parts, by the end of their names, and what they stand for.


def gptq(bits=4, group_size=32, *, version=1, least_zero=1, has_order=False, has_g_idx=True):
    def write(rng, num_out, num_in):
        size = num_in if group_size == -1 else group_size
        groups = np.arange(num_in) // size
        if has_order:
            groups = rng.permutation(groups)
        num_groups = -(-num_in // size)
        codes = rng.integers(0, 1 << bits, (num_out, num_in))
        zeros = rng.integers(least_zero, 1 << bits, (num_groups, num_out))
        scales = rng.uniform(0.01, 0.1, (num_groups, num_out)).astype(np.float16)
        stored_zeros = pack(zeros, bits)
        if version == 1:  # As GPTQModel does it, on whole words; the same as one by one where no zero is 0.
            stored_zeros = (stored_zeros.view(np.uint32) - pack(np.ones_like(zeros), bits).view(np.uint32)).view(
                np.int32
            )
            if least_zero:
                np.testing.assert_array_equal(stored_zeros, pack(zeros - 1, bits))
        parts = {"qweight": np.ascontiguousarray(pack(codes, bits).T), "qzeros": stored_zeros, "scales": scales}
        if has_g_idx:
            parts["g_idx"] = groups.astype(np.int32)
        return parts, (codes - zeros[groups].T) * scales[groups].T.astype(np.float64)

    told = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": has_order, "sym": False}
    return write, told | ({} if version == 1 else {"checkpoint_format": "gptq_v2"})


def awq(group_size=16):
    def write(rng, num_out, num_in):
        size = num_in if group_size == -1 else group_size
        codes = rng.integers(0, 16, (num_in, num_out))
        zeros = rng.integers(0, 16, (num_in // size, num_out))
        scales = rng.uniform(0.01, 0.1, zeros.shape).astype(np.float16)
        parts = {"qweight": pack(codes, 4, AWQ_ORDER), "qzeros": pack(zeros, 4, AWQ_ORDER), "scales": scales}
        groups = np.arange(num_in) // size
        return parts, ((codes - zeros[groups]) * scales[groups].astype(np.float64)).T

    return write, {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": True, "version": "GEMM"}


def float8(told, scale_name, grid, scale_dtype=np.float32, **others):
    """`grid` gives, for the shape of a weight, the shape of its scales and of the block that each is for."""

    def write(rng, num_out, num_in):
        codes = rng.standard_normal((num_out, num_in)).astype(ml_dtypes.float8_e4m3fn)
        shape, block = grid(num_out, num_in)
        scales = np.asarray(np.exp2(rng.uniform(-3, 3, shape)), scale_dtype)
        wide = np.empty((num_out, num_in))
        matrix = scales.astype(np.float64).reshape(-1, shape[1] if len(shape) == 2 else 1)
        for row, column in np.ndindex(num_out, num_in):
            wide[row, column] = matrix[row // block[0], column // block[1]]
        return {"weight": codes, scale_name: scales, **others}, wide * codes.astype(np.float64)

    return write, told


def fp8_config(block=None):
    return {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": block}


def compressed_config(strategy, **changes):
    told = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, "group_size": None}
    group = {"targets": ["Linear"], "weights": told | changes, "input_activations": {"num_bits": 8, "dynamic": True}}
    own = {"quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"]}
    return own | {"config_groups": {"group_0": group}}


def mxfp4():
    def write(rng, num_out, num_in):
        numbers = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
        codes = rng.integers(0, 16, (num_out, num_in // 32, 32))
        exponents = rng.integers(110, 140, (num_out, num_in // 32))
        signed = np.where(codes < 8, 1.0, -1.0) * np.take(numbers, codes % 8)
        wide = np.ldexp(signed, exponents[..., None] - 127).reshape(num_out, num_in)
        blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).astype(np.uint8)
        return {"weight_blocks": blocks, "weight_scales": exponents.astype(np.uint8)}, wide

    return write, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}


def of_blocks(rows, columns):
    return lambda num_out, num_in: ((-(-num_out // rows), -(-num_in // columns)), (rows, columns))


def of_channels(num_out, num_in):
    return (num_out, 1), (1, num_in)


INPUT_SCALE, KV_SCALE = np.ones(1, np.float32), np.ones((), np.float32)
CASES = {
    "fp8_blocks": float8(fp8_config([24, 48]), "weight_scale_inv", of_blocks(24, 48)),
    "fp8_powers_of_two": float8(
        fp8_config([16, 32]), "weight_scale_inv", of_blocks(16, 32), scale_dtype=ml_dtypes.float8_e8m0fnu
    ),
    "fp8_one_scale": float8(fp8_config(), "weight_scale", lambda *shape: ((), shape), input_scale=INPUT_SCALE),
    "fp8_channels": float8(fp8_config(), "weight_scale", of_channels),
    "compressed_tensor": float8(
        *(compressed_config("tensor"), "weight_scale", lambda *shape: ((1,), shape)),
        input_scale=INPUT_SCALE,
        k_scale=KV_SCALE,
    ),
    "compressed_channel": float8(
        compressed_config("channel"), "weight_scale", of_channels, scale_dtype=ml_dtypes.bfloat16
    ),
    "compressed_block": float8(compressed_config("block", block_structure=[16, 16]), "weight_scale", of_blocks(16, 16)),
    "gptq": gptq(),
    "gptq_zeros_of_0": gptq(least_zero=0),
    "gptq_8_bits": gptq(bits=8, group_size=16),
    "gptq_order": gptq(has_order=True),
    "gptq_one_group": gptq(group_size=-1, has_g_idx=False),
    "gptq_v2": gptq(version=2, least_zero=0),
    "gptq_cut_group": gptq(group_size=48, has_g_idx=False),
    "awq": awq(),
    "awq_one_group": awq(group_size=-1),
    "mxfp4": mxfp4(),
}


def write_pair(root, case, change=lambda tensors: None):
    """A quantised directory, its tensors changed, and the plain one of what it stood for before, in f32."""
    write, told = CASES[case]
    rng = np.random.default_rng(0)
    packed, plain = {}, {}
    for name, tensor in tiny.hf_tensors(CONFIG, PARAMS).items():
        if "_proj.weight" not in name or name == LEFT_OUT:
            packed[name] = plain[name] = tensor
            continue
        parts, numbers = write(rng, *tensor.shape)
        packed |= {f"{name.removesuffix('weight')}{end}": part for end, part in parts.items()}
        plain[name] = np.ascontiguousarray(numbers, np.float32)
    change(packed)
    directories = []
    for kind, tensors in (("packed", packed), ("plain", plain)):
        directories.append(tiny.write_tiny_hf(root / kind, CONFIG, PARAMS))
        safetensors.numpy.save_file(tensors, directories[-1] / "model.safetensors")
    rewrite(directories[0] / "config.json", quantization_config=told)
    return directories


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_of_the_plain_checkpoint(tmp_path, monkeypatch, case):
    monkeypatch.setattr(weights, "_CHUNK_ELEMENTS", 700)  # 5 or 10 rows at once, which words of 4 and 8 are no part of.
    packed, plain = write_pair(tmp_path, case)
    for dtype in ("float32", "bfloat16"):
        wanted = load_checkpoint(str(plain), dtype=dtype).params
        assert_same_params(load_checkpoint(str(packed), dtype=dtype).params, wanted)
    path = packed / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = (length + 3).to_bytes(8, "little") + content[8 : 8 + length] + b"   "
    path.write_bytes(header + content[8 + length :])  # No tensor is aligned any more.
    assert_same_params(load_checkpoint(str(packed), dtype="bfloat16").params, wanted)


# References that others wrote.


def test_every_float8_is_that_of_torch():
    torch = pytest.importorskip("torch")
    every = np.arange(256, dtype=np.uint8).reshape(16, 16)
    found = quantized.fp8_rows(every.view(ml_dtypes.float8_e4m3fn), np.ones((1, 1)), (16, 16), 0, 16)
    np.testing.assert_array_equal(found, torch.from_numpy(every).view(torch.float8_e4m3fn).float().numpy())


@pytest.mark.parametrize("scale_dtype", [np.float32, ml_dtypes.float8_e8m0fnu])
def test_fp8_blocks_are_those_of_transformers(scale_dtype):
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.integrations.finegrained_fp8")
    rng = np.random.default_rng(0)
    weight = rng.standard_normal((256, 384)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(0.5, 4, (2, 3)).astype(scale_dtype)

    def tensor(array):
        kind = getattr(torch, array.dtype.name)
        return torch.from_numpy(array.view(np.uint8)).view(kind)

    wanted = theirs.Fp8Dequantize(None)._dequantize_one(tensor(weight), tensor(scales), torch.float32)
    found = quantized.fp8_rows(weight, scales, (128, 128), 100, 256)
    np.testing.assert_array_equal(found, wanted.numpy()[100:])


@pytest.fixture
def experts():
    """Raw MXFP4 tensors of 3 experts `[E, 2D, F]`, of every code and of nearly every exponent."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 10, 4, 16), dtype=np.uint8)
    return {"x.gate_up_proj_blocks": blocks, "x.gate_up_proj_scales": rng.integers(1, 252, (3, 10, 4), dtype=np.uint8)}


def test_mxfp4_experts_are_those_of_transformers_whole_and_one_by_one(experts):
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.integrations.mxfp4")
    raw = map(torch.from_numpy, experts.values())
    wanted = theirs.convert_moe_packed_tensors(*raw, dtype=torch.float32).transpose(1, 2).numpy()
    found = quantized.take(dict(experts), Scheme(method="mxfp4"))["x.gate_up_proj"]
    assert found.shape == (3, 10, 128)
    np.testing.assert_array_equal(found.read_rows(0, 3), wanted)
    for index, expert in enumerate(wanted):
        part = found.part(index)
        assert (part.shape, part.part) == ((10, 128), None)
        np.testing.assert_array_equal(part.read_rows(3, 8), expert[3:8])


# Memory, shards, what goes by the weights.


BIG = tiny.tiny_config(embed_dim=2048, mlp_dim=2048, num_layers=1)
BIG_RAW = {
    "fp8": {"w.weight": ((2048, 2048), ml_dtypes.float8_e4m3fn), "w.weight_scale_inv": ((16, 16), np.float32)},
    "gptq": {
        "w.qweight": ((256, 2048), np.int32),
        "w.qzeros": ((16, 256), np.int32),
        "w.scales": ((16, 2048), np.float16),
        "w.g_idx": ((2048,), np.int32),
    },
    "awq": {
        "w.qweight": ((2048, 256), np.int32),
        "w.qzeros": ((16, 256), np.int32),
        "w.scales": ((16, 2048), np.float16),
    },
    "mxfp4": {"w.weight_blocks": ((2048, 64, 16), np.uint8), "w.weight_scales": ((2048, 64), np.uint8)},
}


@pytest.mark.parametrize("method", BIG_RAW)
def test_a_leaf_is_dequantised_a_chunk_of_rows_at_a_time(method):
    raw = {name: np.zeros(shape, dtype) for name, (shape, dtype) in BIG_RAW[method].items()}
    scheme = Scheme(method=method, group_size=128, block=(128, 128))
    (tensor,) = quantized.take(raw, scheme).values()
    slot = next(slot for slot in weights.parameter_slots(BIG) if slot.key == "mlp.w_up")
    leaf = weights.Leaf(slot=slot, dtype=np.dtype(ml_dtypes.bfloat16), tensors=(tensor,))
    tracemalloc.start()
    leaf.read()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - leaf.nbytes < 6 << 20, "of 16 MiB in f32"


def test_parts_may_lie_in_different_shards_and_each_must_be_there(tmp_path):
    tensors = {}
    packed, plain = write_pair(tmp_path, "fp8_blocks", tensors.update)
    shards = {name: f"model-0000{1 + name.endswith('_inv')}-of-00002.safetensors" for name in tensors}
    for shard in set(shards.values()):
        held = {name: tensor for name, tensor in tensors.items() if shards[name] == shard}
        safetensors.numpy.save_file(held, packed / shard)
    (packed / "model.safetensors").unlink()
    rewrite(packed / "model.safetensors.index.json", weight_map=shards)
    assert_same_params(load_checkpoint(str(packed)).params, load_checkpoint(str(plain)).params)
    (packed / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"missing: model-00002-of-00002\.safetensors"):
        load_checkpoint(str(packed))


def test_the_fingerprint_follows_the_weights_and_how_they_are_read(tmp_path):
    packed, plain = write_pair(tmp_path, "gptq")
    first = load_checkpoint(str(packed)).fingerprint
    assert first == load_checkpoint(str(packed)).fingerprint
    told = json.loads((packed / "config.json").read_text())["quantization_config"]
    rewrite(packed / "config.json", quantization_config=told | {"checkpoint_format": "gptq_v2"})
    second = load_checkpoint(str(packed)).fingerprint
    rewrite(packed / "config.json", quantization_config=told)
    rewrite_tensors(packed, lambda tensors: tensors[f"{Q_PROJ}.qweight"].fill(7))
    third = load_checkpoint(str(packed)).fingerprint
    assert len({first, second, third, load_checkpoint(str(plain)).fingerprint}) == 4


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_biases_of_zeros_that_gptq_adds_are_left_out_and_others_are_not(tmp_path, dtype):
    packed, plain = write_pair(tmp_path, "gptq")
    rewrite_tensors(packed, lambda tensors: tensors.update({f"{Q_PROJ}.bias": np.zeros(64, dtype)}))
    assert_same_params(load_checkpoint(str(packed)).params, load_checkpoint(str(plain)).params)
    rewrite_tensors(packed, lambda tensors: tensors.update({f"{Q_PROJ}.bias": np.ones(64, dtype)}))
    with pytest.raises(CheckpointError, match=rf"1 tensors belong to no parameter.*{Q_PROJ}\.bias"):
        load_checkpoint(str(packed))


@pytest.mark.parametrize("value", [0.0, 2.0])
def test_biases_that_the_family_has_are_read_zeros_or_not(tmp_path, value):
    packed, _ = write_pair(tmp_path, "gptq")
    rewrite(packed / "config.json", model_type="qwen2", architectures=["Qwen2ForCausalLM"])
    sizes = {"q": 64, "k": 32, "v": 32}
    names = {
        f"model.layers.{layer}.self_attn.{each}_proj.bias": size for each, size in sizes.items() for layer in (0, 1)
    }
    biases = {name: np.full(size, value, np.float32) for name, size in names.items()}
    rewrite_tensors(packed, lambda tensors: tensors.update(biases))
    loaded = load_checkpoint(str(packed)).params["params"]["layer_0"]["attn"]
    assert all((loaded[name] == value).all() for name in ("bq", "bk", "bv"))


# Bad input.


GPTQ, AWQ = CASES["gptq"][1], CASES["awq"][1]
REFUSED = [
    ({"quant_method": "bitsandbytes"}, "'bitsandbytes' is not served; quant_method must be one of fp8, compressed"),
    ({"load_in_4bit": True}, "'unnamed' is not served"),
    (GPTQ | {"bits": 3}, "gptq quantization: bits must be 4 or 8, got 3"),
    (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format must be gptq or gptq_v2, got 'marlin'"),
    (GPTQ | {"is_marlin_format": True}, "is_marlin_format must be False or None, got True"),
    (GPTQ | {"pack_dtype": "int16"}, "pack_dtype must be int32 or None, got 'int16'"),
    (GPTQ | {"dynamic": {"-:x": {}, "+:.*up.*": {"bits": 8}}}, r"dynamic must be of modules left out.*'\+:.*up"),
    (GPTQ | {"group_size": 0}, "group_size must be at least 1, or -1, got 0"),
    (AWQ | {"version": "gemv"}, "awq quantization: version must be gemm, got 'gemv'"),
    (AWQ | {"backend": "llm-awq"}, "backend must be autoawq, got 'llm-awq'"),
    (AWQ | {"bits": 8}, "awq quantization: bits must be 4, got 8"),
    (AWQ | {"zero_point": False}, "zero_point must be True, got False"),
    (fp8_config() | {"fmt": "e5m2"}, "fp8 quantization: fmt must be e4m3 .*, got 'e5m2'"),
    (fp8_config([128]), r"weight_block_size must be two sizes of at least 1, got \[128\]"),
    (fp8_config([128, 0]), r"weight_block_size must be two sizes of at least 1, got \[128, 0\]"),
    (fp8_config() | {"expert_dtype": "fp4"}, "expert_dtype must be fp8 or None, got 'fp4'"),
    (compressed_config("group"), "group_0 weights quantization: strategy must be tensor or .*, got 'group'"),
    (compressed_config("channel", type="int"), "type must be float, got 'int'"),
    (compressed_config("channel", num_bits=4), "num_bits must be 8, got 4"),
    (compressed_config("channel", symmetric=False), "symmetric must be True, got False"),
    (compressed_config("block"), "block_structure must be two sizes of at least 1, got None"),
    (
        compressed_config("tensor") | {"format": "pack-quantized"},
        "format must be float-quantized, got 'pack-quantized'",
    ),
    (compressed_config("tensor") | {"transform_config": {"a": 1}}, "transform_config must be None"),
    (compressed_config("tensor") | {"sparsity_config": {"format": "sparse-24"}}, "must be dense, got 'sparse-24'"),
    (compressed_config("tensor") | {"config_groups": {}}, "config_groups must be of weights with one block_structure"),
]


@pytest.mark.parametrize(("told", "message"), REFUSED)
def test_what_is_not_read_is_refused_by_its_name_and_field(told, message):
    described = tiny.hf_config(CONFIG)
    for key in ("quantization_config", "compression_config"):
        with pytest.raises(UnsupportedQuantizationError, match=r"^config\.json: .*" + message):
            huggingface.config_from_hf({**described, key: told})


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"quant_method": "gptq"}, "quantization_config: bits is missing"),
        ({"quant_method": "compressed-tensors"}, "quantization_config: config_groups is missing"),
        ({"quant_method": ["fp8"]}, "quantization_config describes no quantization"),
        (compressed_config("tensor") | {"config_groups": {"FP8": ["Linear"]}}, "describes no quantization"),
        ("fp8", "quantization_config describes no quantization"),
    ],
)
def test_a_config_that_describes_none_is_refused(told, message):
    with pytest.raises(CheckpointError, match=message):
        scheme_from_hf({"quantization_config": told})


def drop(part):
    return lambda tensors: tensors.pop(f"{Q_PROJ}.{part}")


def put(part, shape, dtype, value=0):
    return lambda tensors: tensors.update({f"{Q_PROJ}.{part}": np.full(shape, value, dtype)})


I32, F16, F32, U8 = np.int32, np.float16, np.float32, np.uint8
BROKEN = [
    ("gptq", drop("qweight"), r"q_proj\.qweight is missing"),
    ("gptq", drop("scales"), r"q_proj\.scales is missing; its shape must be \(2, 64\)"),
    ("gptq", drop("qzeros"), r"q_proj\.qzeros is missing; its shape must be \(2, 8\)"),
    ("gptq_order", drop("g_idx"), r"q_proj\.g_idx is missing; its shape must be \(64,\)"),
    ("gptq", put("qweight", (8,), I32), r"q_proj\.qweight: the shape must be of two axes, got \(8,\)"),
    ("gptq", put("qweight", (16, 64), I32), r"q_proj\.scales: the shape must be \(4, 64\), got \(2, 64\)"),
    ("gptq", put("qzeros", (2, 4), I32), r"q_proj\.qzeros: the shape must be \(2, 8\), got \(2, 4\)"),
    ("gptq", put("scales", (1, 64), F16), r"q_proj\.scales: the shape must be \(2, 64\), got \(1, 64\)"),
    ("gptq", put("scales", (2, 64), U8), r"q_proj\.scales: the type must be float32 or .*, got 'uint8'"),
    ("gptq", put("qweight", (8, 64), F32), r"q_proj\.qweight: the type must be int32, got 'float32'"),
    ("gptq", put("g_idx", (64,), I32, 2), r"q_proj\.g_idx must be of groups 0 to 1, got \[2, 2"),
    ("gptq", put("g_idx", (64,), I32, -1), r"q_proj\.g_idx must be of groups 0 to 1, got \[-1"),
    ("awq", drop("scales"), r"q_proj\.scales is missing; its shape must be \(4, 64\)"),
    ("awq", put("qweight", (64, 4), I32), r"q_proj\.scales: the shape must be \(4, 32\), got \(4, 64\)"),
    ("fp8_blocks", drop("weight_scale_inv"), r"q_proj\.weight_scale_inv is missing; its shape must be \(3, 2\)"),
    ("fp8_blocks", drop("weight"), r"q_proj\.weight is missing"),
    ("fp8_blocks", put("weight_scale_inv", (2, 2), F32), r"weight_scale_inv: the shape must be \(3, 2\), got \(2, 2\)"),
    (
        "fp8_channels",
        put("weight_scale", (32, 1), F32),
        r"weight_scale: the shape must be \(1,\) or \(64, 1\), got \(32",
    ),
    ("fp8_channels", drop("weight_scale"), r"q_proj\.weight_scale is missing"),
    ("fp8_channels", put("weight_scale", (64, 1), I32), r"q_proj\.weight_scale: the type must be float32 or"),
    ("mxfp4", drop("weight_scales"), r"q_proj\.weight_scales is missing"),
    ("mxfp4", drop("weight_blocks"), r"q_proj\.weight_blocks is missing; its shape must be \(64, 2, 16\)"),
    (
        "mxfp4",
        put("weight_blocks", (64, 2, 8), U8),
        r"weight_blocks: the shape must be \(64, 2, 16\), got \(64, 2, 8\)",
    ),
    ("mxfp4", put("weight_scales", (64, 2), F32), r"q_proj\.weight_scales: the type must be uint8, got 'float32'"),
]


@pytest.mark.parametrize(("case", "change", "message"), BROKEN)
def test_parts_that_are_missing_or_do_not_fit_are_refused_by_name(tmp_path, case, change, message):
    packed, _ = write_pair(tmp_path, case, change)
    with pytest.raises((CheckpointError, UnsupportedQuantizationError), match=f"packed: tensor .*{message}") as caught:
        load_checkpoint(str(packed))
    wanted = UnsupportedQuantizationError if "type must be" in message else CheckpointError
    assert type(caught.value) is wanted


def test_packed_tensors_of_which_the_config_says_nothing_are_refused(tmp_path):
    packed, _ = write_pair(tmp_path, "gptq")
    rewrite(packed / "config.json", quantization_config=None)
    with pytest.raises(UnsupportedQuantizationError, match=r"packed: tensor .*: type I32 is not served; .* F64, F32"):
        load_checkpoint(str(packed))
