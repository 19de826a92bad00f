"""Reading LoRA adapters as PEFT writes them: what is taken, and what is refused by name."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ca_jax.errors import AdapterError, UnsupportedArchitectureError
from ca_jax.models.adapters import places_of, read_adapter
from ca_jax.models.huggingface import config_from_hf
from tests import adapters_kit as ak
from tests.families_kit import CASES

LAYER = "model.layers.1.self_attn.q_proj"


def read(directory, lora=ak.FIRST, tensors=None, **changes):
    return read_adapter(ak.write(directory, lora, tensors, **changes), "x", ak.CONFIG)


@pytest.mark.parametrize("lora", [ak.FIRST, ak.SECOND, ak.PATTERNED])
def test_what_is_read_is_what_is_merged(lora, tmp_path):
    """A times B, scaled, is what the merged model's weights have more than the base model's, matrix by matrix."""
    found = read(tmp_path, lora)
    base, merged = ak.merged_tensors(None), ak.merged_tensors(lora)
    changed = {name for name in base if not np.array_equal(base[name], merged[name])}
    places = {place.slot.path: f"{place.module}.weight" for place in places_of(ak.CONFIG)}
    assert {places[path] for path in found.matrices} == changed
    for path, (a, b) in found.matrices.items():
        more = merged[places[path]] - base[places[path]]
        np.testing.assert_allclose(a @ b, more.T, rtol=0, atol=1e-6)
    assert found.rank == max(len(b) for _, b in found.matrices.values())


def test_a_fingerprint_is_of_weights_and_scaling(tmp_path):
    found = [
        read(tmp_path / "0"),
        read(tmp_path / "1", ak.Lora(4)),
        read(tmp_path / "2", lora_alpha=13.0),
        read(tmp_path / "3", use_rslora=True),
    ]
    assert len({each.fingerprint for each in found}) == 4
    same = read(tmp_path / "4", lora_dropout=0.5, target_modules=sorted(ak.ALL), base_model_name_or_path=None)
    assert same.fingerprint == found[0].fingerprint
    assert len(same.fingerprint) == 64


REFUSED = {
    "peft_type": ("LOHA", 'peft_type must be "LORA", got "LOHA"'),
    "use_dora": (True, "use_dora must be left out, got true"),
    "modules_to_save": (["lm_head"], r'modules_to_save must be left out, got \["lm_head"\]'),
    "bias": ("all", 'bias must be "none", got "all"'),
    "lora_bias": (True, "lora_bias must be left out, got true"),
    "fan_in_fan_out": (True, "fan_in_fan_out must be left out, got true"),
    "init_lora_weights": (
        "pissa",
        'init_lora_weights must be true or "gaussian" or "eva" or "orthogonal", got "pissa"',
    ),
    "alora_invocation_tokens": ([1, 2], r"alora_invocation_tokens must be left out, got \[1, 2\]"),
    "trainable_token_indices": ([1], "trainable_token_indices must be left out"),
    "a_field_of_tomorrow": ("yes", 'a_field_of_tomorrow must be left out, got "yes": it is not served'),
    "task_type": ("SEQ_CLS", 'task_type must be "CAUSAL_LM", got "SEQ_CLS"'),
    "r": (0, "r must be a number above 0, got 0"),
    "lora_alpha": ("16", "lora_alpha must be a number above 0, got '16'"),
    "rank_pattern": ([4], "rank_pattern must be numbers by the names of modules"),
    "target_modules": (["q_proj", "lm_head"], "target_modules must be among q_proj, k_proj, .* got lm_head"),
    "layers_to_transform": ([0, 1], r"layers_to_transform must be all 3 layers or left out, got \[0, 1\]"),
}


@pytest.mark.parametrize("field", REFUSED)
def test_what_is_not_served_is_refused_by_its_field(field, tmp_path):
    value, message = REFUSED[field]
    with pytest.raises(AdapterError, match=f"adapter_config.json: {message}"):
        read(tmp_path, **{field: value})


def test_target_modules_that_are_an_expression_are_refused(tmp_path):
    with pytest.raises(AdapterError, match=r"target_modules must be a list of names, got '\.\*proj'"):
        read(tmp_path, target_modules=".*proj")


def test_a_config_without_a_type_is_refused(tmp_path):
    directory = ak.write(tmp_path, ak.FIRST)
    described = {name: value for name, value in ak.described(ak.FIRST).items() if name != "peft_type"}
    (directory / "adapter_config.json").write_text(json.dumps(described))
    with pytest.raises(AdapterError, match="peft_type must be"):
        read_adapter(directory, "x", ak.CONFIG)


def test_all_layers_may_be_named(tmp_path):
    assert read(tmp_path, layers_to_transform=[2, 0, 1]).rank == 4


def test_tensors_that_are_missing_unknown_or_of_another_model_are_refused(tmp_path):
    tensors = ak.tensors_of(ak.FIRST)
    a, b = (f"{ak.PREFIX}{LAYER}.lora_{part}.weight" for part in "AB")
    with pytest.raises(AdapterError, match=rf"tensor {b} is missing; its shape must be \(64, 4\)"):
        read(tmp_path, tensors={name: each for name, each in tensors.items() if name != b})
    with pytest.raises(AdapterError, match=rf"tensor {a}: the shape must be \(4, 64\), got \(4, 72\)"):
        read(tmp_path, tensors=tensors | {a: np.zeros((4, 72), np.float32)})
    with pytest.raises(AdapterError, match=r"tensor .*: the shape must be \(5, 64\), got \(4, 64\)"):
        read(tmp_path, r=5)
    other = f"{ak.PREFIX}{LAYER}.lora_magnitude_vector"
    with pytest.raises(AdapterError, match=f"1 tensors belong to no target module: {other}"):
        read(tmp_path, tensors=tensors | {other: np.zeros(64, np.float32)})


def test_modules_that_were_left_out_in_training_may_lack(tmp_path):
    names = [name for name in ak.tensors_of(ak.FIRST) if f"{LAYER}." not in name]
    tensors = {name: ak.tensors_of(ak.FIRST)[name] for name in names}
    assert len(read(tmp_path, tensors=tensors, exclude_modules=[LAYER]).matrices) == 3 * len(ak.ALL) - 1


def test_files_that_are_damaged_or_missing_are_named(tmp_path):
    directory = ak.write(tmp_path / "adapter", ak.FIRST)
    (directory / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors: not a whole safetensors file"):
        read_adapter(directory, "x", ak.CONFIG)
    (directory / "adapter_config.json").write_text("[1]")
    with pytest.raises(AdapterError, match="contents must be a JSON object, got list"):
        read_adapter(directory, "x", ak.CONFIG)
    with pytest.raises(AdapterError, match=r"nowhere/adapter_config\.json: cannot be read as JSON"):
        read_adapter(tmp_path / "nowhere", "x", ak.CONFIG)


@pytest.mark.parametrize(
    "changes",
    [{"rank_pattern": {"(": 4}}, {"alpha_pattern": {"*": 4}}, {"target_modules": [5]}, {"rank_pattern": {"q_proj": 0}}],
)
def test_a_config_that_describes_no_adapter_is_refused(tmp_path, changes):
    tensors = ak.tensors_of(ak.FIRST)
    if changes.get("rank_pattern") == {"q_proj": 0}:
        tensors = {name: each[:0] if "q_proj.lora_A" in name else each for name, each in tensors.items()}
        tensors = {name: each[:, :0] if "q_proj.lora_B" in name else each for name, each in tensors.items()}
    with pytest.raises(AdapterError, match="its files describe no adapter"):
        read(tmp_path, tensors=tensors, **changes)


def test_weights_of_bfloat16_are_read(tmp_path):
    import ml_dtypes

    tensors = ak.tensors_of(ak.FIRST)
    halved = {name: each.astype(ml_dtypes.bfloat16) for name, each in tensors.items()}
    again = {name: each.astype(np.float32) for name, each in halved.items()}
    found = [read(tmp_path / f"{index}", tensors=each) for index, each in enumerate((halved, again))]
    assert found[0].fingerprint == found[1].fingerprint


@pytest.mark.parametrize(
    "name", ["mixtral", "phi3", "falcon_7b", "neox", "deepseek_v2", "llama", "qwen2", "qwen3", "olmo2"]
)
def test_a_family_is_served_where_its_files_have_a_matrix_each(name):
    transformers = pytest.importorskip("transformers")
    kind, fields = CASES[name]
    described = getattr(transformers, f"{kind}Config")(**fields).to_dict()
    config = config_from_hf(described | {"architectures": [f"{kind}ForCausalLM"]})
    if name in ("llama", "qwen2", "qwen3", "olmo2"):
        assert {place.target for place in places_of(config)} == {*ak.ALL}
        return
    with pytest.raises(UnsupportedArchitectureError, match=f"max_adapters must be 0 with family {config.architecture}"):
        places_of(config)
